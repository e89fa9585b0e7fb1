"""Whether every sample of files can be read and decoded, and which cannot."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from echelon.data.decode import SampleDecoder
from echelon.data.formats.arrow_columns import TableReader
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.reader import (
    BadSampleError,
    ChunkTable,
    DataFile,
    SampleReader,
    find_piece,
)
from echelon.data.open_files import Paths, find_data, open_reader
from echelon.data.parallel_map import count_processes, map_in_order
from echelon.data.shard_manifest import (
    MANIFEST_NAME,
    ShardEntry,
    find_difference,
    read_manifest,
)
from echelon.errors import EchelonError, Fault
from echelon.utils.os_errors import format_os_error_reason

BATCH_BYTES = 16 << 20
"""What is read at once, about."""
_BATCH_ROWS = 1024
_TASK_BYTES = 64 << 20
_TASK_ROWS = 1 << 16


class BadSamples(NamedTuple):
    """Samples that cannot be read, or a file that cannot, and why."""

    file: DataPath
    first: int | None
    """Within the file, from 0; None where it is about the whole file."""
    samples: int
    key: str
    why: str

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.file}: {self.why}"
        key = f" ({self.key})" if self.key else ""
        if self.samples == 1:
            return f"{self.file}, sample {self.first}{key}: {self.why}"
        return f"{self.file}, samples {self.first} to {self.first + self.samples - 1}: {self.why}"


class CheckProgress(NamedTuple):
    """What is known after a piece of the work."""

    samples: int
    """Looked at in this piece."""
    bad: list[BadSamples]


class _CheckTask(NamedTuple):
    """Rows of a file to read, or with `entry` its bytes to compare."""

    files: tuple[DataFile, ...]
    format: str
    total: int
    """Samples of the file when it was opened."""
    first: int
    stop: int
    entry: ShardEntry | None = None


class FileCheck:
    """The check of all samples of some files.

        check = FileCheck("data/*.tar", None)
        for progress in check.run(processes=2):
            ...

    A file that cannot be opened is bad as a whole, and the others are checked all the same.
    """

    def __init__(self, paths: Paths, format: str | None) -> None:
        """Find the files and open each. Raises EchelonError where none are meant."""
        files, self.format = find_data(paths, format)
        self.files = len(files)
        self.bad_files: list[BadSamples] = []
        self._tasks: list[_CheckTask] = []
        self._check_manifests([paths] if isinstance(paths, (str, os.PathLike)) else paths)
        self.samples = 0
        opened = [file for file in files if self._add_file(file)]
        if len(opened) > 1:
            try:
                open_reader(opened, self.format)
            except EchelonError as error:  # what they have is not alike
                first = opened[0].path
                self.bad_files += [_make_bad_file(first, fault) for fault in error.faults]

    def _add_file(self, file: DataFile) -> bool:
        try:
            reader = open_reader([file], self.format)
            SampleDecoder("auto", reader.column_names)
        except EchelonError as error:
            self.bad_files += [_make_bad_file(file.path, fault) for fault in error.faults]
            return False
        self.samples += len(reader)
        for first, stop in cut_batches(
            reader.chunks, 0, len(reader), _TASK_BYTES, _TASK_ROWS, across=True
        ):
            self._tasks.append(_CheckTask((file,), self.format, len(reader), first, stop))
        return True

    def _check_manifests(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """Add a task for each shard that a list in one of the folders has."""
        for folder in map(Path, paths):
            try:
                manifest = read_manifest(folder) if folder.is_dir() else None
            except EchelonError as error:
                self.bad_files.append(_make_bad_file(folder / MANIFEST_NAME, error.faults[0]))
                continue
            if manifest is None:
                continue
            if not manifest.is_complete:
                why = "its packing has not ended: `echelon data pack` goes on with it"
                self.bad_files.append(BadSamples(folder / MANIFEST_NAME, None, 0, "", why))
            for name, entry in manifest.shards.items():
                file = DataFile(folder / name, folder)
                self._tasks.append(_CheckTask((file,), self.format, 0, 0, 0, entry))

    def run(self, processes: int | None = None) -> Iterator[CheckProgress]:
        """Yields what was found, piece by piece, in the order of the files."""
        yield CheckProgress(0, self.bad_files)
        count = count_processes(processes, len(self._tasks))
        yield from map_in_order(_check_piece, self._tasks, count)


def cut_batches(
    chunks: ChunkTable,
    first: int,
    stop: int,
    max_bytes: int = BATCH_BYTES,
    max_rows: int = _BATCH_ROWS,
    *,
    across: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges of rows, each of about so many bytes at most. None spans two
    chunks, unless `across` says that it may have several whole ones."""
    ranges: list[tuple[int, int]] = []
    pending_bytes = 0
    chunk = find_piece(chunks.starts, first)[0]
    begin = first
    while begin < stop:
        start, end = int(chunks.starts[chunk]), int(chunks.starts[chunk + 1])
        size = int(chunks.sizes_bytes[chunk])
        row_bytes = max(1.0, size / max(1, end - start))
        rows = max(1, min(max_rows, int(max_bytes / row_bytes)))
        end = min(end, stop)
        for cut in range(begin, end, rows):
            part = (cut, min(cut + rows, end))
            part_bytes = int((part[1] - part[0]) * row_bytes)
            fits = pending_bytes + part_bytes <= max_bytes
            if across and ranges and fits and part[1] - ranges[-1][0] <= max_rows:
                ranges[-1] = (ranges[-1][0], part[1])
                pending_bytes += part_bytes
            else:
                if ranges:
                    yield ranges.pop()
                ranges.append(part)
                pending_bytes = part_bytes
        begin, chunk = end, chunk + 1
    yield from ranges


def _make_bad_file(file: DataPath, fault: Fault) -> BadSamples:
    """Return a fault of a file; the file is not named twice."""
    if fault.what == f"there are no samples in {file}":
        return BadSamples(file, None, 0, "", "it has no samples")
    is_named = fault.what.startswith(f"{file} ")
    why = f"it {fault.what[len(str(file)) + 1 :]}" if is_named else fault.what
    return BadSamples(file, None, 0, "", why)


# --- in the processes ---


@functools.lru_cache(4)
def _open_once(files: tuple[DataFile, ...], format: str) -> tuple[SampleReader, SampleDecoder]:
    reader = open_reader(files, format)
    return reader, SampleDecoder("auto", reader.column_names)


def _check_piece(task: _CheckTask) -> CheckProgress:
    file = task.files[0].path
    try:
        if task.entry is not None:
            assert isinstance(file, Path)  # lists of shards are read from file systems only
            why = find_difference(file, task.entry)
            return CheckProgress(0, [BadSamples(file, None, 0, "", why)] if why else [])
        reader, decoder = _open_once(task.files, task.format)
        if len(reader) != task.total:
            raise OSError("it changed while it was checked")
        bad: list[BadSamples] = []
        for first, stop in cut_batches(reader.chunks, task.first, task.stop):
            for found in _check_rows(reader, decoder, range(first, stop)):
                _append_or_join(bad, found)
    except EchelonError as error:
        why = "; ".join(_make_bad_file(file, fault).why for fault in error.faults)
    except OSError as error:
        why = format_os_error_reason(error)
    else:
        return CheckProgress(task.stop - task.first, bad)
    count = task.stop - task.first
    return CheckProgress(count, [BadSamples(file, None, count, "", why)])


def _check_rows(reader: SampleReader, decoder: SampleDecoder, rows: range) -> Iterator[BadSamples]:
    try:
        samples = reader.read_samples(rows)
    except BadSampleError as error:
        if isinstance(reader, TableReader):  # a piece of a table is read as a whole
            place = reader.locate(rows.start)
            yield BadSamples(place.file, place.number, len(rows), "", error.why)
        elif len(rows) > 1:
            middle = (rows.start + rows.stop) // 2
            for begin, end in pairwise((rows.start, middle, rows.stop)):
                yield from _check_rows(reader, decoder, range(begin, end))
        else:
            yield _describe_error(reader, rows.start, error)
        return
    for row, sample in zip(rows, samples, strict=True):
        try:
            decoder.decode_sample(sample, functools.partial(reader.locate, row))
        except BadSampleError as error:
            yield _describe_error(reader, row, error)


def _describe_error(reader: SampleReader, row: int, error: BadSampleError) -> BadSamples:
    place = error.place if error.place.key else reader.locate(row)
    return BadSamples(place.file, place.number, 1, place.key, " ".join(error.why.split()))


def _append_or_join(bad: list[BadSamples], found: BadSamples) -> None:
    """Add to a list what was found; neighbours of a row group that cannot be read are one."""
    last = bad[-1] if bad else None
    if (
        last is not None
        and found.samples > 1
        and (last.file, last.why) == (found.file, found.why)
        and (last.first or 0) + last.samples == found.first
    ):
        bad[-1] = last._replace(samples=last.samples + found.samples)
    else:
        bad.append(found)
