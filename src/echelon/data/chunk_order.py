"""The order of samples that lie in chunks on a disk, as a function of (seed, epoch, position).

A shuffle of all samples reads a file at random places, and a table's row group once for every
sample in it. Here chunks of neighbouring samples are permuted, consecutive chunks of that order
form windows of bounded size, and the samples of each window are permuted: reads stay within a
window, whose chunks are read once. All permutations are keyed (`sample_order.py`), so that any
position is reached at once, and neither the rank nor the world size enters. What is kept grows with
the number of chunks, not of samples.

The order is part of what a snapshot promises; `tests/data/test_chunk_order.py` pins some values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from echelon.data.formats.reader import ChunkTable, sum_to_starts
from echelon.data.sample_order import EpochOrder, map_positions
from echelon.errors import EchelonError, Fault

DEFAULT_WINDOW_BYTES = 256 << 20
_CATCH_UP_PARTS = 4
"""Of the chunks that should have been named at the start of an epoch, a quarter is named with each
batch: all at once would keep the disk from the samples of the first."""
_MAX_BLOCK_WINDOWS = 64
"""Windows of a block: one costs some hundred microseconds, however few of its samples are drawn."""


class EpochWindows(NamedTuple):
    """The chunks of one epoch in their order, cut into windows."""

    chunks: NDArray[np.int64]
    """By place in this order: the number of the chunk in the data."""
    chunk_positions: NDArray[np.int64]
    """By place of a chunk: the position of its first sample in the epoch; and the end."""
    window_positions: NDArray[np.int64]
    """By window: the position of its first sample in the epoch; and the end."""


class ChunkWindows:
    """How the samples of a table of chunks are shuffled: within windows of at most so many bytes,
    or of one chunk where that has more."""

    def __init__(
        self,
        chunks: ChunkTable,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        rows: NDArray[np.int64] | None = None,
        chunk_numbers: NDArray[np.int64] | None = None,
    ) -> None:
        """`rows` are the samples of the chunks, one after the other, where these are not in the
        order of the data; `chunk_numbers` those that the reader of the files knows the chunks by,
        where some have no samples."""
        self.chunks, self.window_bytes = chunks, window_bytes
        self._chunk_samples = np.diff(chunks.starts)
        self.rows, self.chunk_numbers = rows, chunk_numbers
        self._arranged: dict[tuple[int, int], EpochWindows] = {}

    @property
    def is_one_window(self) -> bool:
        """Whether everything fits one window, so that the plain shuffle is as good for the disk."""
        return int(self.chunks.sizes_bytes.sum()) <= self.window_bytes

    def arrange_epoch(self, seed: int, epoch: int) -> EpochWindows:
        """Return the chunks of an epoch in their order, in windows.

        The last two are kept: loader processes begin an epoch before the one before has ended.
        """
        if (seed, epoch) not in self._arranged:
            newest = list(self._arranged.items())[-1:]
            self._arranged = dict(newest) | {(seed, epoch): self._arrange(seed, epoch)}
        return self._arranged[seed, epoch]

    def _arrange(self, seed: int, epoch: int) -> EpochWindows:
        count = len(self.chunks.sizes_bytes)
        # Of a million chunks an array takes 8 MB, and to make one longer than to fill it.
        word = torch.int32 if count < 1 << 31 else torch.int64
        places = torch.arange(count, dtype=word)
        order = map_positions(places, count, seed, epoch, "chunks/").numpy()
        sums = np.empty(count + 1, np.int64)
        window_starts = self._cut_windows(_accumulate(self.chunks.sizes_bytes, order, sums))
        chunk_positions = _accumulate(self._chunk_samples, order, sums)
        return EpochWindows(order, chunk_positions, chunk_positions[window_starts])

    def _cut_windows(self, bytes_before: NDArray[np.int64]) -> list[int]:
        """Return the places of chunks at which windows begin, and the end."""
        borders, end = [0], len(bytes_before) - 1
        while borders[-1] < end:
            first = borders[-1]
            stop = bytes_before.searchsorted(bytes_before[first] + self.window_bytes, "right") - 1
            borders.append(max(int(stop), first + 1))
        return borders


def _accumulate(
    values: NDArray[np.int64], order: NDArray[np.int64], sums: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Write the sums of all values before each in this order, and of all, into `sums`."""
    sums[0] = 0
    values.take(order, out=sums[1:], mode="clip")  # which takes no copy, as "raise" does
    np.cumsum(sums[1:], out=sums[1:])
    return sums


def find_chunk_windows(data: Any) -> ChunkWindows | None:
    """Return how a Dataset whose samples lie in chunks is shuffled; None for any other, and where
    all of it fits one window."""
    if type(data) is Subset:
        return _find_subset_windows(data)
    chunks = getattr(data, "chunks", None)
    if not isinstance(chunks, ChunkTable):
        return None
    if (count := int(chunks.starts[-1])) != len(data):
        raise EchelonError(
            Fault(
                f"the chunks of a {type(data).__name__} have {count:,} samples, but its length is "
                f"{len(data):,}",
                "give it a ChunkTable of its own samples, or none",
            )
        )
    windows = ChunkWindows(chunks, getattr(data, "window_bytes", DEFAULT_WINDOW_BYTES))
    return None if windows.is_one_window else windows


def _find_subset_windows(subset: Subset[Any]) -> ChunkWindows | None:
    """Return how a Subset of data in chunks is shuffled, such as a part of `random_split`: its
    samples in the order of the data, in the chunks of the data."""
    data: Any = subset
    indices = np.arange(len(subset))
    window_bytes = getattr(subset, "window_bytes", None)
    while type(data) is Subset:
        indices = np.asarray(data.indices, np.int64)[indices]
        data = data.dataset
    whole = find_chunk_windows(data)
    if whole is None or not len(indices):
        return None
    indices %= len(data)  # they may be counted from the end
    rows = np.argsort(indices, kind="stable")
    counts = np.bincount(
        np.searchsorted(whole.chunks.starts, indices, "right") - 1,
        minlength=len(whole.chunks.sizes_bytes),
    )
    used = np.flatnonzero(counts)
    # Most formats read a chunk as a whole, however few of its samples are asked for.
    chunks = ChunkTable(sum_to_starts(counts[used]), whole.chunks.sizes_bytes[used])
    windows = ChunkWindows(chunks, window_bytes or whole.window_bytes, rows, used)
    return None if windows.is_one_window else windows


@dataclass(frozen=True, kw_only=True)
class ChunkedOrder(EpochOrder):
    """The indices of one rank through one epoch of data in chunks."""

    windows: ChunkWindows

    def map_positions(self, positions: Tensor) -> Tensor:
        """Return the samples at these positions of the epoch, which ascend."""
        arranged = self.windows.arrange_epoch(self.seed, self.epoch)
        wanted = positions.cpu().numpy()
        starts = arranged.window_positions
        # An empty chunk that is a window of its own begins where the next one does: take the last.
        windows = starts.searchsorted(wanted, "right") - 1
        borders = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(wanted)]
        shuffled = np.empty_like(wanted)
        for begin, end in pairwise(borders) if len(wanted) else ():
            window = int(windows[begin])
            first, stop = int(starts[window]), int(starts[window + 1])
            within = torch.from_numpy(wanted[begin:end] - first)
            key = f"window {window}/"
            drawn = map_positions(within, stop - first, self.seed, self.epoch, key).numpy()
            shuffled[begin:end] = drawn + first
        places = arranged.chunk_positions.searchsorted(shuffled, "right") - 1
        shuffled -= arranged.chunk_positions[places]
        shuffled += self.windows.chunks.starts[arranged.chunks[places]]
        if self.windows.rows is not None:
            shuffled = self.windows.rows[shuffled]
        return torch.from_numpy(shuffled).to(positions.device)

    def _find_run_end(self, first: int, samples: int) -> int:
        """Return the batch after the run that starts at `first`, which touches few windows."""
        stop = super()._find_run_end(first, samples)
        arranged = self.windows.arrange_epoch(self.seed, self.epoch)
        window_samples = self.size // (len(arranged.window_positions) - 1)
        return min(stop, first + max(1, _MAX_BLOCK_WINDOWS * window_samples // self.batch_size))


class ChunkLookahead:
    """Which chunks will be needed soon, as the batches of an epoch go by.

    While a window is read, the chunks of the next one are named at the same pace, in their order,
    each once: what is named and not needed yet is never more than a window.
    """

    def __init__(self, order: ChunkedOrder, first_batch: int = 0) -> None:
        self._arranged = order.windows.arrange_epoch(order.seed, order.epoch)
        self._chunk_numbers = order.windows.chunk_numbers
        self._size, self._batch_size = order.size, order.batch_size
        self._position = min(first_batch * order.batch_size, order.size)
        window = min(self._find_window(self._position), len(self._arranged.window_positions) - 2)
        first = self._arranged.window_positions[window]
        self._place = int(self._arranged.chunk_positions.searchsorted(first))
        """Of the next chunk to name."""
        self._due_place = self._find_due_place()
        self._due_at = 0
        """Nothing is to be named before this position."""

    def advance_batch(self) -> list[int]:
        """Go one batch further, and return the chunks to be named with it."""
        self._position = min(self._position + self._batch_size, self._size)
        if self._position < self._due_at:
            return []
        due = self._find_due_place()
        late = self._due_place - self._place
        stop = due - late + -(-late // _CATCH_UP_PARTS)
        chunks = self._arranged.chunks[self._place : stop]
        if self._chunk_numbers is not None:
            chunks = self._chunk_numbers[chunks]
        named: list[int] = chunks.tolist()
        self._place, self._due_place = stop, due
        self._due_at = self._find_due_position() if stop == due else 0
        return named

    def _find_window(self, position: int) -> int:
        return int(self._arranged.window_positions.searchsorted(position, "right")) - 1

    def _find_due_place(self) -> int:
        """Return the place of the first chunk that need not be named yet."""
        borders = self._arranged.window_positions
        window = self._find_window(self._position)
        if window + 2 >= len(borders):
            return len(self._arranged.chunks)
        start, border, stop = borders[window : window + 3].tolist()
        due = border + (self._position - start) * (stop - border) // (border - start)
        return int(self._arranged.chunk_positions.searchsorted(due))

    def _find_due_position(self) -> int:
        """Return the position in the epoch from which on the next chunk is to be named."""
        if self._place >= len(self._arranged.chunks):
            return self._size + 1
        borders = self._arranged.window_positions
        begin = int(self._arranged.chunk_positions[self._place])
        window = min(self._find_window(begin), len(borders) - 2)
        if not window:
            return 0
        start, border, stop = borders[window - 1 : window + 2].tolist()
        return int(start + (begin - border) * (border - start) // max(1, stop - border))
