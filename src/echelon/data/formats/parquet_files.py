"""Parquet: files, folders and hive partitions. A row group is read when a row of it is asked for,
the chosen columns only, and kept while the order reads near it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from echelon.data.formats.arrow_columns import (
    ENCODED_TYPE,
    cut_rows,
    import_pyarrow,
    make_types,
)
from echelon.data.formats.byte_source import DataPath, get_size, open_for_arrow
from echelon.data.formats.column_choice import (
    check_same_names,
    check_same_types,
    choose_columns,
    raise_faults,
)
from echelon.data.formats.packed_rows import choose_packed
from echelon.data.formats.read_ahead import read_ahead
from echelon.data.formats.reader import (
    BadPieceError,
    ChunkTable,
    DataFile,
    SamplePlace,
    find_piece,
    sum_to_starts,
)
from echelon.data.formats.table_reader import TableReader
from echelon.data.formats.text_views import has_text_views
from echelon.errors import EchelonError, Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.os_errors import format_os_error_reason

_OPEN_FILES = 64
_FOOTER_THREADS = 16
"""For folders on a network, where reading 10,000 footers one by one takes minutes."""
_MEASURED_ROWS = 1000
"""What texts and lists take in memory is measured on so many rows; dictionaries of a file make it
more than what is stored."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class _Footer(NamedTuple):
    """What is kept of a file's footer."""

    types: dict[str, str]
    widths: dict[str, int]
    """Bytes of a value; 0 where they differ."""
    group_rows: list[int]
    group_bytes: list[dict[str, int]]
    """Of each row group, by column, not compressed."""


class _Piece(NamedTuple):
    """Rows of a row group."""

    file: int
    group: int
    first: int
    rows: int


class ParquetReader(TableReader):
    """The rows of Parquet files. The names and values of hive partitions are columns too."""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        self._paths = [file.path for file in files]
        footers = _read_footers(self._paths)
        self._partitions = _read_partitions(files)
        types = [{**dict.fromkeys(self._partitions, ""), **footer.types} for footer in footers]
        if columns is None:
            check_same_names(self._paths, types)
        self.column_names = choose_columns(self._paths, types, columns)
        check_same_types(self._paths, types, self.column_names)
        self.encoded_columns = [n for n in self.column_names if types[0][n] == ENCODED_TYPE]
        self._stored = [name for name in self.column_names if name in footers[0].types]
        self._file_starts = sum_to_starts([sum(footer.group_rows) for footer in footers])
        self._open_files: OrderedDict[int, Any] = OrderedDict()
        row_bytes = self._measure_row(footers)
        self._pieces: list[_Piece] = []
        sizes = []
        for file, footer in enumerate(footers):
            for group, rows in enumerate(footer.group_rows):
                size = sum(
                    max(footer.group_bytes[group].get(name, 0), rows * row_bytes[name])
                    if not footer.widths[name]
                    else rows * footer.widths[name]
                    for name in self._stored
                )
                for first, count, part_bytes in cut_rows(rows, size):
                    self._pieces.append(_Piece(file, group, first, count))
                    sizes.append(part_bytes)
        rows_of_pieces = [piece.rows for piece in self._pieces]
        mean_bytes = sum(sizes) // max(1, sum(rows_of_pieces))
        packed = choose_packed(types, self.column_names, mean_bytes, has_text_views())
        super().__init__(rows_of_pieces, packed, mean_bytes)
        self.chunks = ChunkTable(self._piece_starts, np.asarray(sizes, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Every process opens the files itself."""
        return {**self.__dict__, "_open_files": OrderedDict()}

    def locate(self, row: int) -> SamplePlace:
        """Return the file and the number of a row in it."""
        file, number = find_piece(self._file_starts, row)
        return SamplePlace(self._paths[file], number)

    locate_stored = locate

    def load_piece(self, piece: int) -> tuple[dict[str, Any], int]:
        """Reads and decodes a row group, or a part of it."""
        pa = import_pyarrow()
        file, group, first, count = self._pieces[piece]
        try:
            opened = self._open_file(file)
            if isinstance(path := self._paths[file], RemoteFile):  # at once, not page by page
                path.fetch_ranges(self._list_ranges(opened.metadata.row_group(group)))
            if opened.metadata.row_group(group).num_rows == count:
                table = opened.read_row_group(group, self._stored, use_threads=False)
            else:
                table = _read_part(opened, group, self._stored, first, count)
        except (OSError, pa.ArrowException) as error:
            place = self.locate(int(self._piece_starts[piece]))
            what = f"its row group {group} cannot be read: {' '.join(str(error).split())}"
            raise BadPieceError(place, what) from error
        columns = {name: table.column(name) for name in self._stored}
        for name, values in self._partitions.items():
            columns.setdefault(name, _repeat_value(values[file], count))
        return columns, sum(columns[n].nbytes for n in columns if n not in self._packed)

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have the chosen columns of row groups read into the system's cache."""
        for file, group, first, _ in (self._pieces[chunk] for chunk in chunks):
            if first:  # a part of a row group that is read as a whole
                continue
            try:
                metadata = self._open_file(file).metadata.row_group(group)
            except (OSError, EchelonError, import_pyarrow().ArrowException):  # reading says why
                continue
            for start, stop in self._list_ranges(metadata):
                read_ahead(self._paths[file], start, stop)

    def _list_ranges(self, group: Any) -> Iterator[tuple[int, int]]:
        """Yield where the chosen columns of a row group are in its file."""
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema.partition(".")[0] in self._stored:
                # Some writers give 0 where there is no dictionary.
                start = column.dictionary_page_offset or column.data_page_offset
                yield start, start + column.total_compressed_size

    def _open_file(self, file: int) -> Any:
        """Return an open file; the ones that were used last stay open."""
        if file not in self._open_files:
            parquet = import_pyarrow("pyarrow.parquet")
            opened = parquet.ParquetFile(
                open_for_arrow(self._paths[file]),
                memory_map=False,
                page_checksum_verification=True,
            )
            rows = int(self._file_starts[file + 1] - self._file_starts[file])
            if opened.metadata.num_rows != rows:
                what = f"{self._paths[file]} changed since it was opened: it had {rows:,} rows"
                raise EchelonError(Fault(what, "let its writer finish, and start again"))
            self._open_files[file] = opened
            if len(self._open_files) > _OPEN_FILES:
                self._open_files.popitem(last=False)[1].close()
        self._open_files.move_to_end(file)
        return self._open_files[file]

    def _measure_row(self, footers: Sequence[_Footer]) -> dict[str, int]:
        """Return what the values of a column of other than fixed width take in memory, from the
        first rows."""
        varied = [name for name in self._stored if not footers[0].widths[name]]
        measured = dict.fromkeys(self._stored, 0)
        filled = [file for file, footer in enumerate(footers) if sum(footer.group_rows)]
        if varied and filled:
            opened = self._open_file(filled[0])
            batches = opened.iter_batches(_MEASURED_ROWS, [0], varied, use_threads=False)
            batch = next(iter(batches))
            for name in varied:
                measured[name] = batch.column(name).nbytes // max(1, batch.num_rows)
        return measured


def _read_part(opened: Any, group: int, columns: list[str], first: int, count: int) -> Any:
    """Return some rows of a row group. Those before them are decoded, but not kept."""
    pa = import_pyarrow()
    parts, position = [], 0
    for batch in opened.iter_batches(1 << 16, [group], columns, use_threads=False):
        begin, end = max(first - position, 0), min(first + count - position, batch.num_rows)
        if begin < end:
            parts.append(batch.slice(begin, end - begin))
        position += batch.num_rows
        if position >= first + count:
            break
    return pa.Table.from_batches(parts).combine_chunks()  # a slice would keep the whole batch


def _repeat_value(value: Any, count: int) -> Any:
    pa = import_pyarrow()
    return pa.array(np.full(count, value)) if isinstance(value, int) else pa.repeat(value, count)


# --- what the files have ---


def _read_footers(paths: Sequence[DataPath]) -> list[_Footer]:
    with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
        footers = list(threads.map(_read_footer, paths))
    raise_faults([footer for footer in footers if isinstance(footer, Fault)])
    return [footer for footer in footers if isinstance(footer, _Footer)]


def _read_footer(path: DataPath) -> _Footer | Fault:
    pa, parquet = import_pyarrow(), import_pyarrow("pyarrow.parquet")
    try:
        if not get_size(path):
            return Fault(f"{path} is empty (0 bytes)", "write it again, or leave it out")
        metadata = parquet.read_metadata(open_for_arrow(path))
        schema = metadata.schema.to_arrow_schema()
        types = make_types(schema)
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())
        what = f"{path} is not a complete Parquet file: {reason}"
        return Fault(what, "write it again: it may be cut off")
    except EchelonError as error:
        return error.faults[0]
    except ValueError as error:
        return Fault(f"{path} {error}", "write it again with names of their own")
    except OSError as error:
        reason = format_os_error_reason(error)
        return Fault(f"{path} cannot be read: {reason}", "check the file and its permissions")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return _Footer(
        types,
        {field.name: _measure_width(field.type) for field in schema},
        [group.num_rows for group in groups],
        [_sum_by_column(group) for group in groups],
    )


def _measure_width(kind: Any) -> int:
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # texts, lists, structs
        return 0


def _sum_by_column(group: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for number in range(group.num_columns):
        column = group.column(number)
        name = column.path_in_schema.partition(".")[0]
        sizes[name] = sizes.get(name, 0) + int(column.total_uncompressed_size)
    return sizes


def _read_partitions(files: Sequence[DataFile]) -> dict[str, list[Any]]:
    """Return the values of hive partitions, by name, for every file: whole numbers where all are,
    else texts. Raises where files are in other partitions than the first."""
    found = []
    for path, folder in files:
        parts = path.relative_to(folder).parts[:-1]
        pairs = [part.partition("=") for part in parts if "=" in part]
        found.append({name: unquote(value) for name, _, value in pairs})
    names = list(found[0])
    raise_faults(
        [
            Fault(
                f"{file.path} is in partitions by {list(own)}, and {files[0].path} by {names}",
                "open folders with the same partitions",
            )
            for file, own in zip(files, found, strict=True)
            if list(own) != names
        ]
    )
    return {name: _parse_values([own[name] for own in found]) for name in names}


def _parse_values(texts: list[str]) -> list[Any]:
    known = [text for text in texts if text != _NO_VALUE]
    are_numbers = all(text.lstrip("-").isdecimal() for text in known)
    if are_numbers and len(known) == len(texts):
        return [int(text) for text in texts]
    return [None if text == _NO_VALUE else text for text in texts]
