"""Arrow IPC files and streams, and folders of Hugging Face's `save_to_disk`, memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.arrow_columns import (
    ENCODED_TYPE,
    MAX_PIECE_BYTES,
    cut_rows,
    import_pyarrow,
    make_types,
)
from echelon.data.formats.byte_source import DataPath, fetch_local_copy, get_size
from echelon.data.formats.column_choice import (
    check_same_names,
    check_same_types,
    choose_columns,
    raise_faults,
)
from echelon.data.formats.packed_rows import choose_packed
from echelon.data.formats.read_ahead import read_ahead
from echelon.data.formats.reader import (
    ChunkTable,
    DataFile,
    SamplePlace,
    cut_files_evenly,
    find_piece,
    sum_to_starts,
)
from echelon.data.formats.table_reader import CACHE_BYTES, TableReader
from echelon.data.formats.text_views import has_text_views
from echelon.errors import EchelonError, Fault
from echelon.object_store.block_cache import LIMIT_VARIABLE, open_cache
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.files import read_json_object
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_bytes, join_names

_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
_OPEN_THREADS = 16
_VIEW_BYTES = 4 << 10
"""What a mapped column takes of a process's own memory, about."""


class _Layout(NamedTuple):
    """What is kept of a file."""

    types: dict[str, str]
    batch_rows: list[int]
    batch_bytes: list[dict[str, int]]
    """Of each record batch, by column."""
    batch_spans: list[tuple[int, int]]
    """Of each record batch, the bytes of the file that it is in; (0, 0) where it is compressed."""


class _SavedDataset(NamedTuple):
    """A folder of `save_to_disk`, or a file by itself."""

    files: list[DataPath]
    indices: list[Path]
    """Files with the numbers of the rows that belong to it; none where all do."""


class ArrowReader(TableReader):
    """The rows of Arrow files. Of a folder of Hugging Face, those that its indices choose."""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        saved = _read_saved([file.path for file in files])
        self._paths = [path for each in saved for path in each.files]
        _check_cache_size(self._paths)
        layouts = _read_layouts(self._paths)
        types = [layout.types for layout in layouts]
        if columns is None:
            check_same_names(self._paths, types)
        self.column_names = choose_columns(self._paths, types, columns)
        check_same_types(self._paths, types, self.column_names)
        self.encoded_columns = [n for n in self.column_names if types[0][n] == ENCODED_TYPE]
        file_rows = [sum(layout.batch_rows) for layout in layouts]
        self._file_starts = sum_to_starts(file_rows)
        self._order = _read_order(saved, file_rows)
        self._mapped: dict[int, _MappedFile] = {}
        self._places = [
            (file, batch)
            for file, layout in enumerate(layouts)
            for batch in range(len(layout.batch_rows))
        ]
        rows = [count for layout in layouts for count in layout.batch_rows]
        sizes = [
            sum(size for name, size in batch.items() if name in self.column_names)
            for layout in layouts
            for batch in layout.batch_bytes
        ]
        self._batch_spans = [span for layout in layouts for span in layout.batch_spans]
        mean_bytes = sum(sizes) // max(1, sum(rows))
        packed = choose_packed(types, self.column_names, mean_bytes, has_text_views())
        super().__init__(rows, packed if self._may_pack(sizes) else {}, mean_bytes)
        self.chunks = self._cut_chunks(rows, sizes)

    def _may_pack(self, sizes: Sequence[int]) -> bool:
        """Return whether record batches of so many bytes may be copied as a whole for some of their
        rows: those that are decoded are anyway, and mapped ones where all can be kept. Packed texts
        take a little more."""
        is_mapped = any(stop for _, stop in self._batch_spans)
        return max(sizes, default=0) <= MAX_PIECE_BYTES and (
            not is_mapped or sum(sizes) <= CACHE_BYTES // 3 * 2
        )

    def _cut_chunks(self, rows: Sequence[int], sizes: Sequence[int]) -> ChunkTable:
        if self._order is not None:  # its rows may be anywhere
            return cut_files_evenly([len(self._order)], sum(sizes) // max(1, sum(rows)))
        parts = [part for each in zip(rows, sizes, strict=True) for part in cut_rows(*each)]
        starts = sum_to_starts([count for _, count, _ in parts])
        return ChunkTable(starts, np.asarray([size for _, _, size in parts], np.int64))

    def __len__(self) -> int:
        return super().__len__() if self._order is None else len(self._order)

    def __getstate__(self) -> dict[str, Any]:
        """Every process maps the files itself."""
        return {**self.__dict__, "_mapped": {}}

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of these rows."""
        return super().read_columns(rows if self._order is None else self._order[rows])

    def locate(self, row: int) -> SamplePlace:
        """Return the file and the number of a row in it."""
        return self.locate_stored(row if self._order is None else int(self._order[row]))

    def locate_stored(self, row: int) -> SamplePlace:
        """Return the same of a row that the indices may not choose."""
        file, number = find_piece(self._file_starts, row)
        return SamplePlace(self._paths[file], number)

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have record batches read into the system's cache."""
        if self._order is not None:
            return
        for first in self.chunks.starts[list(chunks)].tolist():
            piece, within = find_piece(self._piece_starts, first)
            start, stop = self._batch_spans[piece]
            if stop and not within:  # all columns of a batch lie one after the other
                read_ahead(self._paths[self._places[piece][0]], start, stop)

    def load_piece(self, piece: int) -> tuple[dict[str, Any], int]:
        """Return a record batch. What is not compressed stays on the disk until it is used."""
        file, number = self._places[piece]
        if file not in self._mapped:
            self._mapped[file] = _MappedFile(self._paths[file])
        batch = self._mapped[file].get_batch(number)
        rows = int(self._piece_starts[piece + 1] - self._piece_starts[piece])
        if batch is None or batch.num_rows != rows:
            what = f"{self._paths[file]} changed since it was opened"
            raise EchelonError(Fault(what, "let its writer finish, and start again"))
        columns = {name: batch.column(name) for name in self.column_names}
        is_mapped = not self._mapped[file].is_compressed
        kept = [column for name, column in columns.items() if name not in self._packed]
        return columns, sum(_VIEW_BYTES if is_mapped else column.nbytes for column in kept)


class _MappedFile:
    """An Arrow file or stream, memory-mapped."""

    def __init__(self, data: DataPath) -> None:
        pa = import_pyarrow()
        path = fetch_local_copy(data)
        with path.open("rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        mapped = pa.memory_map(str(path))
        whole = mapped.read_buffer(mapped.size())
        mapped.seek(0)
        reader = pa.ipc.open_stream(mapped) if is_stream else pa.ipc.open_file(mapped)
        self.schema = reader.schema
        # The batches of a stream are found one after the other, those of a file by their number.
        self._batches = list(reader) if is_stream else None
        self._reader = reader
        self.count = len(self._batches or []) if is_stream else reader.num_record_batches
        first = self.get_batch(0)
        buffers = [] if first is None else [each for c in first for each in c.buffers() if each]
        self._begin, self._end = whole.address, whole.address + whole.size
        self.is_compressed = any(
            b.size and not self._begin <= b.address < self._end for b in buffers
        )
        self.is_stream = is_stream

    def find_span(self, batch: Any) -> tuple[int, int]:
        """Return where the values of a record batch begin and end in the file."""
        buffers = [b for column in batch for b in column.buffers() if b and b.size]
        if self.is_compressed or not buffers:
            return 0, 0
        begins = [buffer.address - self._begin for buffer in buffers]
        ends = [at + buffer.size for at, buffer in zip(begins, buffers, strict=True)]
        return max(0, min(begins)), min(max(ends), self._end - self._begin)

    def get_batch(self, number: int) -> Any:
        """Return a record batch, or None where there are not so many."""
        if number >= self.count:
            return None
        return self._batches[number] if self._batches else self._reader.get_batch(number)


def _check_cache_size(paths: Sequence[DataPath]) -> None:
    """Raises where objects are more than the cache may have. They stay mapped, and on its disk."""
    total = sum(path.size for path in paths if isinstance(path, RemoteFile))
    limit = open_cache(os.environ).limit_bytes if total else 0
    if total > limit:
        what = f"Arrow files of {format_bytes(total)} are fetched as a whole, and the cache of "
        what += f"objects may have {format_bytes(limit)}"
        remedy = f"set {LIMIT_VARIABLE} to more, or write Parquet, which is fetched in parts"
        raise EchelonError(Fault(what, remedy))


def _read_layouts(paths: Sequence[DataPath]) -> list[_Layout]:
    with ThreadPoolExecutor(_OPEN_THREADS) as threads:
        layouts = list(threads.map(_read_layout, paths))
    raise_faults([layout for layout in layouts if isinstance(layout, Fault)])
    return [layout for layout in layouts if isinstance(layout, _Layout)]


def _read_layout(path: DataPath) -> _Layout | Fault:
    pa = import_pyarrow()
    try:
        if not get_size(path):
            return Fault(f"{path} is empty (0 bytes)", "write it again, or leave it out")
        mapped = _MappedFile(path)
        if mapped.is_stream and mapped.is_compressed:
            return Fault(
                f"{path} is a compressed Arrow stream, which can only be read from its beginning",
                "write it as a file (pyarrow.feather.write_feather), or without compression",
            )
        types = make_types(mapped.schema)
        rows, sizes, spans = [], [], []
        for number in range(mapped.count):
            batch = mapped.get_batch(number)
            rows.append(batch.num_rows)
            sizes.append({name: batch.column(name).nbytes for name in types})
            spans.append(mapped.find_span(batch))
    except pa.ArrowException as error:
        what = f"{path} is not a complete Arrow file: {' '.join(str(error).split())}"
        return Fault(what, "write it again: it may be cut off")
    except EchelonError as error:
        return error.faults[0]
    except ValueError as error:
        return Fault(f"{path} {error}", "write it again with names of their own")
    except OSError as error:
        # pyarrow's own errors about what is in a file may be of this class, without a number.
        reason = format_os_error_reason(error) if error.errno else " ".join(str(error).split())
        return Fault(f"{path} cannot be read: {reason}", "check the file: it may be cut off")
    return _Layout(types, rows, sizes, spans)


# --- folders of Hugging Face ---


def is_saved_dataset(folder: Path) -> bool:
    """Return whether Hugging Face's `save_to_disk` wrote a folder."""
    # Path.is_file raises for a folder that may not be read.
    return any(os.path.isfile(folder / name) for name in (_STATE_FILE, _SPLITS_FILE))


def _read_saved(paths: Sequence[DataPath]) -> list[_SavedDataset]:
    saved = [
        _read_state(path) if isinstance(path, Path) and path.is_dir() else _SavedDataset([path], [])
        for path in paths
    ]
    raise_faults([each for each in saved if isinstance(each, Fault)])
    return [each for each in saved if isinstance(each, _SavedDataset)]


def _read_state(folder: Path) -> _SavedDataset | Fault:
    if (folder / _SPLITS_FILE).is_file():
        splits = (read_json_object(folder / _SPLITS_FILE) or {}).get("splits") or ["train"]
        return Fault(
            f"{folder} has several splits: {join_names(splits)}",
            f"open one of them: {folder / splits[0]}",
        )
    state = read_json_object(folder / _STATE_FILE)
    try:
        names, indices = (
            [entry["filename"] for entry in (state or {}).get(key) or []]
            for key in ("_data_files", "_indices_data_files")
        )
    except (TypeError, KeyError):
        names = indices = []
    if not names:
        what = f"{folder / _STATE_FILE} names no files"
        return Fault(what, "save the dataset again with save_to_disk")
    missing = [name for name in (*names, *indices) if not (folder / name).is_file()]
    if missing:
        what = f"{folder} lacks {join_names(missing)}, which its {_STATE_FILE} names"
        return Fault(what, "copy the whole folder, or save the dataset again")
    return _SavedDataset([folder / name for name in names], [folder / name for name in indices])


def _read_order(
    saved: Sequence[_SavedDataset], file_rows: Sequence[int]
) -> NDArray[np.int64] | None:
    """Return the stored rows in the order that the indices give, or None where there are none."""
    if not any(each.indices for each in saved):
        return None
    order, begin, files = [], 0, iter(file_rows)
    for each in saved:
        count = sum(next(files) for _ in each.files)
        chosen = [np.arange(count)] if not each.indices else []
        for path in each.indices:
            mapped = _MappedFile(path)
            batches = [mapped.get_batch(number) for number in range(mapped.count)]
            chosen += [batch.column(0).to_numpy().astype(np.int64) for batch in batches]
        order += [begin + rows for rows in chosen]
        if any(len(rows) and rows.max() >= count for rows in chosen):
            what = f"the indices of {each.files[0]} are of more than its {count:,} rows"
            raise EchelonError(Fault(what, "save the dataset again with save_to_disk"))
        begin += count
    return np.concatenate(order)
