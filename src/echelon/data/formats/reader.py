"""What a format of files must be able to do: give any sample by its number, and say which samples
lie together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.read_ahead import read_ahead
from echelon.data.formats.remote_rows import RemoteRows
from echelon.errors import escape_controls

CHUNK_BYTES = 4 << 20
"""What is read together where a format has no pieces of its own: large enough for any disk to be
read at its full speed, small enough for a window to mix many of them."""

_PAGE_BYTES = 4096


class SamplePlace(NamedTuple):
    """Where a sample is, as a message names it: `data/train-003.tar, sample 17 (n0017)`."""

    file: DataPath
    number: int
    """Within the file, from 0."""
    key: str = ""
    """Its own name in the file, if it has one."""

    def __str__(self) -> str:
        key = f" ({self.key})" if self.key else ""
        return escape_controls(f"{self.file}, sample {self.number}{key}")


@dataclass(frozen=True)
class ChunkTable:
    """Neighbouring samples that are best read together: pieces of a tar of some megabytes, row
    groups of Parquet. Chunk c has the samples `starts[c]` up to `starts[c + 1]`."""

    starts: NDArray[np.int64]
    """One more than there are chunks: the last is the number of samples."""
    sizes_bytes: NDArray[np.int64]
    """Of each chunk, as it is in memory while it is read."""


class SampleReader(Protocol):
    """The samples of a list of files of one format, in the order of the files.

    A reader is made in the training process and used in loader processes as well: it opens files
    when it first reads, once in every process, and can be pickled and forked.
    """

    chunks: ChunkTable
    column_names: list[str]
    """What a sample has: extensions of tar members, columns of a table."""

    def __len__(self) -> int: ...

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples by number, each with its columns as they are stored: bytes of tar members,
        Python and numpy values of a table. Raises BadSampleError."""
        ...

    def locate(self, row: int) -> SamplePlace:
        """Return where a sample is."""
        ...


class ColumnReader(Protocol):
    """A reader that also gives many samples as columns, far faster than one by one."""

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of these samples: arrays or tensors with a row for each, or lists of
        their values where those are no numbers, or have different shapes."""
        ...


class PrefetchingReader(Protocol):
    """A reader that can bring chunks nearer before their samples are asked for."""

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Begin to fetch chunks, by their numbers in `chunks`, in the order in which they will be
        needed. It is called in the process that reads samples, now and then, with a few chunks each
        time; every process of a machine may be told of the same ones. It returns at once and raises
        nothing: where a chunk cannot be fetched, reading it says why."""
        ...


class DataFile(NamedTuple):
    """A file that a reader reads."""

    path: DataPath
    folder: PurePath
    """The folder that was opened; of an object, that of its key. Hive partitions (`year=2024`) are
    folders between the two."""


def split_columns(columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the samples of `count` rows that were read as columns."""
    names = list(columns)
    if not names:
        return [{} for _ in range(count)]
    values = zip(*columns.values(), strict=True)
    return [dict(zip(names, row, strict=True)) for row in values]


def cut_files_evenly(file_rows: Sequence[int], row_bytes: int) -> ChunkTable:
    """Return the chunks of files whose rows are all of one size. No chunk spans two files."""
    rows = max(1, CHUNK_BYTES // max(1, row_bytes))
    counts = [
        min(rows, file_count - first)
        for file_count in file_rows
        for first in range(0, file_count, rows)
    ]
    lengths = np.asarray(counts, np.int64)
    return ChunkTable(sum_to_starts(lengths), lengths * row_bytes)


def read_rows_ahead(
    paths: Sequence[DataPath], starts: NDArray[np.int64], first: int, stop: int, row_bytes: int
) -> None:
    """Have the rows `[first, stop)` of one of several files read into the system's cache. Rows are
    `row_bytes` apart, after a header that is shorter than a page."""
    file, within = find_piece(starts, first)
    read_ahead(paths[file], within * row_bytes, (within + stop - first) * row_bytes + _PAGE_BYTES)


def sum_to_starts(counts: Any) -> NDArray[np.int64]:
    """Return where each of consecutive pieces of so many rows begins, and the end of the last."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def find_piece(starts: NDArray[np.int64], row: int) -> tuple[int, int]:
    """Return the piece that has a row, of pieces with these starts, and its number in there."""
    piece = int(np.searchsorted(starts, row, side="right")) - 1
    return piece, row - int(starts[piece])


def group_by_piece(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64] | slice, NDArray[np.int64]]]:
    """Yields each piece that has some of the rows, their places among the rows, and their numbers
    within the piece."""
    pieces = np.searchsorted(starts, rows, side="right") - 1
    if not len(pieces) or (pieces == pieces[0]).all():
        if len(pieces):
            yield int(pieces[0]), slice(None), rows - starts[pieces[0]]
        return
    low = int(pieces.min())
    if int(pieces.max()) - low < 1 << 16:  # numpy sorts these by their digits: ten times as fast
        pieces = (pieces - low).astype(np.uint16)
    else:
        low = 0
    order = np.argsort(pieces, kind="stable")
    grouped, sorted_rows = pieces[order], rows[order]
    borders = [0, *(np.flatnonzero(grouped[1:] != grouped[:-1]) + 1).tolist(), len(rows)]
    for begin, end in pairwise(borders):
        piece = int(grouped[begin]) + low
        yield piece, order[begin:end], sorted_rows[begin:end] - starts[piece]


def gather_rows(
    arrays: Sequence[NDArray[Any] | RemoteRows],
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    step: int = 1,
) -> NDArray[Any]:
    """Return a copy of these rows of all arrays together, of which only every `step`-th is
    counted. `starts` says where each array begins."""
    if len(arrays) == 1 and isinstance(arrays[0], np.ndarray):
        # `take` is several times as fast, but copies what is not in this order in memory whole.
        flags = arrays[0].flags
        gathered: NDArray[Any]
        if flags.c_contiguous and flags.aligned:
            gathered = arrays[0].take(rows * step, 0)
        else:
            gathered = arrays[0][rows * step]
        return gathered
    gathered = np.empty((len(rows), *arrays[0].shape[1:]), arrays[0].dtype)
    for piece, places, within in group_by_piece(starts, rows):
        array = arrays[piece]
        wanted = within * step
        gathered[places] = array.gather(wanted) if isinstance(array, RemoteRows) else array[wanted]
    return gathered


class BadSampleError(Exception):
    """A sample that cannot be read or decoded. `place` says which, the text why."""

    def __init__(self, place: SamplePlace, why: str) -> None:
        super().__init__(place, why)
        self.place, self.why = place, why

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class BadPieceError(BadSampleError):
    """The same of all samples of a chunk, such as a row group that cannot be decoded."""
