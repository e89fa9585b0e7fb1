"""Where each sample of a file begins and how long it is: found once, kept in a file, mapped.

    data/train-000.tar
    data/.echelon/train-000.tar.index     header, chunks, offsets, spans

An index is a file for each file of data, beside it, or in the user's cache folder by content where
that folder cannot be written. Nothing of it is held in memory but the table of chunks: the rest is
mapped when a sample is read, and all processes of a machine share its pages. It holds numbers only,
so an index that somebody else wrote may be used: its chunks have a checksum, and what it says of a
sample is checked where the sample is read.

A new format gives a function that reads one file and returns its `SampleSpans`; see `load_index`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from echelon.data.formats.byte_source import ByteSource, DataPath, list_blocks, open_source
from echelon.data.formats.index_layout import (
    INDEX_VERSION,
    BuildIndex,
    FileStamp,
    IndexTask,
    SampleSpans,
    StoredIndex,
    make_changed_fault,
    make_unreadable_fault,
    read_index,
    stamp_file,
)
from echelon.data.formats.index_worker import run_index_tasks
from echelon.data.formats.read_ahead import read_ahead
from echelon.data.formats.reader import CHUNK_BYTES, BadSampleError, ChunkTable, SamplePlace
from echelon.errors import EchelonError, Fault
from echelon.object_store.remote_file import RemoteFile, fetch_blocks
from echelon.utils.cache_root import get_cache_root
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import make_trusted_folder

__all__ = ["BuildIndex", "FileIndex", "SampleSpans", "load_index"]

_OPEN_FILES = 64
"""Files of data that a process keeps open, each with its index. Many systems allow 1,024."""
_CHECK_THREADS = 16
"""For folders on a network, where every file that is asked for costs a round trip."""
_LOCK_NAME = "lock"


@dataclass(frozen=True)
class FileIndex:
    """The samples of a list of files, by number: where they are, and their bytes."""

    kind: str
    files: list[DataPath]
    starts: NDArray[np.int64]
    """File f has the samples `starts[f]` up to `starts[f + 1]`."""
    chunks: ChunkTable
    notes: list[dict[str, Any]]
    """Of each file, what its `SampleSpans` had."""
    _found: list[StoredIndex]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, row: int) -> SamplePlace:
        """Return the file and the number of a sample, without its key."""
        if not 0 <= row < len(self):
            raise IndexError(f"there is no sample {row}: there are {len(self):,}")
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return SamplePlace(self.files[file], row - int(self.starts[file]))

    def read_spans(self, rows: Sequence[int]) -> list[bytes]:
        """Return the bytes of samples, in the order in which they are asked for."""
        spans = [b""] * len(rows)
        for position, span in self.iter_spans(rows):
            spans[position] = span
        return spans

    def iter_spans(self, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yields the place of each sample among the rows, and its bytes.

        They are read in the order of the files, neighbours together. Raises BadSampleError for one
        that cannot be read, and EchelonError if a file is another one since it was indexed.
        """
        if not len(rows):
            return
        numbers = np.asarray(rows, np.int64)
        if numbers.min() < 0 or numbers.max() >= len(self):
            for row in rows:
                self.locate(row)
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        owners = np.searchsorted(self.starts, numbers, side="right") - 1
        borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(numbers)]
        self._fetch_remote(owners, numbers)
        positions = order.tolist()
        for begin, end in itertools.pairwise(borders):
            file = int(owners[begin])
            spans = self._read_from_file(file, numbers[begin:end] - self.starts[file])
            yield from zip(positions[begin:end], spans, strict=True)

    def find_spans(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return for each sample the number of its file, its offset there and its span."""
        found = []
        for row in rows:
            file = int(np.searchsorted(self.starts, row, side="right")) - 1
            opened = self._open_file(file)
            number = row - int(self.starts[file])
            found.append((file, int(opened.offsets[number]), int(opened.spans[number])))
        return found

    def map_offsets(self, file: int) -> NDArray[np.uint64]:
        """Return the offsets of all samples of a file, by its number, as a view of its index."""
        found = self._found[file]
        path = self.files[file]
        return _open_indexed_file(path, self.kind, found.path, found.checksum).offsets

    def read_chunks_ahead(self, chunks: Sequence[int], offset_bits: int = 0) -> None:
        """Have chunks read into the system's cache. Of offsets that are virtual, the lowest
        `offset_bits` are no part of the place in the file."""
        for chunk in chunks:
            first, end = (int(row) for row in self.chunks.starts[chunk : chunk + 2])
            if first == end:
                continue
            try:
                (file, start, _), (_, last, span) = self.find_spans([first, end - 1])
            except EchelonError:  # reading says why
                continue
            stop = (last >> offset_bits) + max(span, 1 << offset_bits)
            read_ahead(self.files[file], start >> offset_bits, stop)

    def _fetch_remote(self, owners: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Fetch what is needed of objects at once, rather than one after the other."""
        wanted = {}
        for owner in np.unique(owners).tolist():
            if isinstance(file := self.files[owner], RemoteFile):
                opened = self._open_file(owner)
                within = numbers[owners == owner] - self.starts[owner]
                offsets = opened.offsets[within]
                wanted[file] = list_blocks(offsets, offsets + opened.spans[within])
        fetch_blocks(wanted)

    def _open_file(self, file: int) -> _IndexedFile:
        found = self._found[file]
        return _open_indexed_file(self.files[file], self.kind, found.path, found.checksum)

    def _read_from_file(self, file: int, numbers: NDArray[np.int64]) -> Iterator[bytes]:
        """Yield the bytes of samples of one file; their numbers ascend."""
        path, opened = self.files[file], self._open_file(file)
        offsets = opened.offsets[numbers].tolist()
        spans = opened.spans[numbers].tolist()
        begin = 0
        while begin < len(offsets):
            first = offsets[begin]
            stop, end = first + spans[begin], begin + 1
            while end < len(offsets) and offsets[end] == stop and stop - first < CHUNK_BYTES:
                stop, end = stop + spans[end], end + 1
            try:
                data = opened.source.read_at(first, stop - first)
            except OSError as error:
                place = SamplePlace(path, int(numbers[begin]))
                raise BadSampleError(place, format_os_error_reason(error)) from error
            if len(data) < stop - first:
                last = next(
                    i for i in range(begin, end) if offsets[i] + spans[i] > first + len(data)
                )
                raise BadSampleError(SamplePlace(path, int(numbers[last])), "the file ends in it")
            if end == begin + 1:
                yield data
            else:
                for offset, span in zip(offsets[begin:end], spans[begin:end], strict=True):
                    yield data[offset - first : offset - first + span]
            begin = end


def load_index(files: Sequence[DataPath], kind: str, build_one: BuildIndex) -> FileIndex:
    """Return the index of a list of files; those that have none, or are others by now, are indexed.

    ``kind`` names the format, with a number that changes when ``build_one`` returns something else
    for the same file: ``tar-1``. What follows a slash is how the file is read, where that can be
    done in several ways and ``build_one`` is a partial: each way has an index of its own. All
    processes of a training may call this at once: one builds, the others wait. Raises EchelonError
    with the faults of all files.
    """
    found = _find_all(files, kind)
    missing = [file for file, index in zip(files, found, strict=True) if index is None]
    if missing:
        _build_missing(missing, kind, build_one)
        found = _find_all(files, kind)
    complete = [index for index in found if index is not None]
    if len(complete) < len(found):
        changed = [file for file, index in zip(files, found, strict=True) if index is None]
        raise EchelonError(*map(make_changed_fault, changed))
    starts = np.cumsum([0, *(index.samples for index in complete)], dtype=np.int64)
    chunk_starts = [index.chunk_starts + starts[i] for i, index in enumerate(complete)]
    chunk_bytes = [index.chunk_bytes for index in complete]
    empty = np.zeros(0, np.int64)
    chunks = ChunkTable(
        np.concatenate([*chunk_starts, starts[-1:]]), np.concatenate([empty, *chunk_bytes])
    )
    notes = [index.notes for index in complete]
    return FileIndex(kind, list(files), starts, chunks, notes, complete)


# --- finding ------------------------------------------------------------------------------------


def _find_all(files: Sequence[DataPath], kind: str) -> list[StoredIndex | None]:
    """Return the index of each file, None where there is none that fits."""
    faults: list[Fault] = []
    with ThreadPoolExecutor(_CHECK_THREADS) as threads:
        tasks = [threads.submit(_find_index, file, kind) for file in files]
    for file, task in zip(files, tasks, strict=True):
        if isinstance(error := task.exception(), OSError):
            faults.append(make_unreadable_fault(file, error))
    if faults:
        raise EchelonError(*faults)
    return [task.result() for task in tasks]


def _find_index(file: DataPath, kind: str) -> StoredIndex | None:
    stamp = stamp_file(file)
    for path in _list_candidates(file, kind, stamp):
        if (found := read_index(path, kind)) and found.stamp == stamp:
            return found
    return None


def _list_candidates(file: DataPath, kind: str, stamp: FileStamp) -> list[Path]:
    """Return where the index of a file may be, the preferred place first."""
    candidates = []
    if not isinstance(file, RemoteFile):
        variant = kind.partition("/")[2]
        name = f"{file.name}.{variant}.index" if variant else f"{file.name}.index"
        candidates.append(file.parent / ".echelon" / name)
    with contextlib.suppress(RuntimeError):  # a user without a home, as in some containers
        key = xxhash.xxh3_128_hexdigest(json.dumps([INDEX_VERSION, kind, *stamp]).encode())
        candidates.append(get_cache_root(os.environ) / "indexes" / f"{key}.index")
    return candidates


# --- building -----------------------------------------------------------------------------------


def _build_missing(files: list[DataPath], kind: str, build_one: BuildIndex) -> None:
    """Index files that have no index, unless another process does so first."""
    targets = _choose_targets(files, kind)
    with contextlib.ExitStack() as locks:
        # All processes lock in one order, so that none waits for another in a circle; and a folder
        # that is reached by several links once, so that none waits for itself.
        for folder in sorted({target.parent.resolve() for target in targets.values()}):
            with contextlib.suppress(LocksUnsupportedError):  # then several build the same
                locks.enter_context(FileLock(folder / _LOCK_NAME))
        found = _find_all(files, kind)
        tasks = [
            IndexTask(file, targets[file], kind, build_one)
            for file, index in zip(files, found, strict=True)
            if index is None
        ]
        if faults := run_index_tasks(tasks):
            raise EchelonError(*faults)


def _choose_targets(files: list[DataPath], kind: str) -> dict[DataPath, Path]:
    """Return for each file where its index is to be written, in a folder that can be written."""
    refused: dict[Path, str | None] = {}
    targets: dict[DataPath, Path] = {}
    faults: list[Fault] = []
    for file in files:
        candidates = _list_candidates(file, kind, stamp_file(file))
        for folder in (candidate.parent for candidate in candidates):
            if folder not in refused:
                refused[folder] = _prepare_folder(folder)
        writable = [path for path in candidates if refused[path.parent] is None]
        if writable:
            targets[file] = writable[0]
            continue
        why = "; ".join(f"{path.parent}: {refused[path.parent]}" for path in candidates)
        remedy = "make one of them writable, or set ECHELON_CACHE to a folder that is"
        faults.append(Fault(f"the index of {file} cannot be written: {why}", remedy))
    if faults:
        raise EchelonError(*faults)
    return targets


def _prepare_folder(folder: Path) -> str | None:
    """Make a folder for indexes, and return why it cannot be written if so."""
    try:
        make_trusted_folder(folder)
        (
            folder / _LOCK_NAME
        ).touch()  # fails where nothing can be written, though a lock may be had
    except OSError as error:
        return format_os_error_reason(error)
    return None


# --- reading ------------------------------------------------------------------------------------


class _IndexedFile:
    """An open file of data with its mapped index."""

    def __init__(self, source: ByteSource, index: StoredIndex) -> None:
        self.source = source
        count = index.samples
        # An empty part of a file cannot be mapped.
        mapped = (
            np.asarray(np.memmap(index.path, np.uint8, "r", index.offsets_at)) if count else _NONE
        )
        self.offsets = mapped[: 8 * count].view(np.uint64)
        self.spans = mapped[8 * count :].view(index.span_type)


_NONE = np.zeros(0, np.uint8)


@functools.lru_cache(_OPEN_FILES)
def _open_indexed_file(path: DataPath, kind: str, index_path: Path, checksum: int) -> _IndexedFile:
    """Return an open file with its index; EchelonError if either is not the one that was loaded."""
    try:
        source = open_source(path)
    except OSError as error:
        raise EchelonError(make_unreadable_fault(path, error)) from error
    index = read_index(index_path, kind)
    is_known = index is not None and index.checksum == checksum
    if index and is_known and (source.size, source.mtime_ns) == index.stamp[:2]:
        return _IndexedFile(source, index)
    raise EchelonError(make_changed_fault(path))
