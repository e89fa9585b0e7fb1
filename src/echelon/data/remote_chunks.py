"""Which chunks of objects in a store the samples of a Dataset lie in: of files, of a Subset of
them, or of several sources of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.file_dataset import FileDataset, find_file_dataset
from echelon.data.mixture import Mixture

_AHEAD_BYTES = 64 << 20
"""So much of the samples that are drawn next is fetched before they are needed."""


class _Part(NamedTuple):
    """Files in an object store, as a Dataset or one source of a mixture."""

    files: FileDataset
    subsets: list[Any]
    """The indices of the Subsets around them."""
    first_row: int
    stop_row: int
    first_chunk: int
    stop_chunk: int


class RemoteChunks:
    """The chunks of all objects that a Dataset is read from, numbered through its sources."""

    def __init__(self, dataset: Any) -> None:
        self.is_mixture = isinstance(dataset, Mixture)
        """Whether samples are read one by one."""
        sources = dataset.sources if isinstance(dataset, Mixture) else [dataset]
        self._parts: list[_Part] = []
        self._size = len(dataset)
        row = chunk = 0
        for source in sources:
            stop_row = row + len(source)
            files, subsets = find_file_dataset(source)
            if files is not None and files.is_remote:
                stop_chunk = chunk + len(files.chunks.sizes_bytes)
                self._parts.append(_Part(files, subsets, row, stop_row, chunk, stop_chunk))
                chunk = stop_chunk
            row = stop_row

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def max_samples_ahead(self) -> int:
        """How many samples are worth to be looked at before they are needed."""
        largest = max((part.files.row_bytes for part in self._parts), default=0)
        return _AHEAD_BYTES // max(1, largest)

    def find_chunks(self, draws: Sequence[int]) -> list[int]:
        """Return the chunk of each drawn sample that is in a store."""
        rows = np.asarray(draws, np.int64) % self._size
        found: list[int] = []
        for part in self._parts:
            within = rows[(rows >= part.first_row) & (rows < part.stop_row)] - part.first_row
            in_files = _map_to_files(within, part) % len(part.files)
            chunks = np.searchsorted(part.files.chunks.starts, in_files, "right") - 1
            found += (chunks + part.first_chunk).tolist()
        return found

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have chunks fetched, in this order."""
        for part in self._parts:
            own = [each - part.first_chunk for each in chunks if each in _get_range(part)]
            if own:
                part.files.prefetch_chunks(own)


def _get_range(part: _Part) -> range:
    return range(part.first_chunk, part.stop_chunk)


def _map_to_files(rows: NDArray[np.int64], part: _Part) -> NDArray[np.int64]:
    for indices in part.subsets:
        rows = np.asarray([indices[row] for row in rows.tolist()], np.int64)
    return rows
