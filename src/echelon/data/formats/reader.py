"""What a format of files must be able to do: give any sample by its number, and say which samples
lie together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class SamplePlace(NamedTuple):
    """Where a sample is, as a message names it: `data/train-003.tar, sample 17 (n0017)`."""

    file: Path
    number: int
    """Within the file, from 0."""
    key: str = ""
    """Its own name in the file, if it has one."""

    def __str__(self) -> str:
        return f"{self.file}, sample {self.number}" + (f" ({self.key})" if self.key else "")


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


class BadSampleError(Exception):
    """A sample that cannot be read or decoded. `place` says which, the text why."""

    def __init__(self, place: SamplePlace, why: str) -> None:
        super().__init__(place, why)
        self.place, self.why = place, why

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"
