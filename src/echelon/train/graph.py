"""A training step as one CUDA graph: cut the batch, forward, backward, all-reduce, clip, optimizer.

A small step is made of dozens of kernels that each run shorter than the host needs to start them.
Captured once and replayed, they follow each other at the speed of the chip. The graph finds its
batch by a counter on the device, in a block of many batches that is copied in when it is used up,
and leaves its loss in a ring that is read every few steps; the host starts it and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from echelon.data.batches import Cut

RING = 64
"""Steps between two readings."""

_ALIGN_BYTES = 256
"""Every column of a batch begins as if it had been allocated alone."""


class Blocks:
    """Many batches, each with its columns one behind the other: one copy cuts a batch out."""

    def __init__(self, cut: Cut, capacity: int) -> None:
        self._mine = cut.mine
        self._shapes = [t.shape[1:] for t in cut.block]
        self._kinds = [t.dtype for t in cut.block]
        sizes = [t[:1].nbytes * cut.mine for t in cut.block]
        ends = accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
        starts = [0, *ends]
        self._places = [slice(start, start + n) for start, n in zip(starts, sizes, strict=False)]
        words = max(_ALIGN_BYTES, starts[-1]) // torch.int64.itemsize
        self._words = torch.empty(
            (capacity // cut.mine, words), dtype=torch.int64, device=cut.block[0].device
        )

    def load(self, block: tuple[Tensor, ...]) -> None:
        """Its whole batches; a last one that is smaller is not the graph's."""
        count = len(block[0]) // self._mine
        for column, kept in zip(block, self._columns(self._words[:count]), strict=True):
            kept.copy_(column[: count * self._mine].reshape(kept.shape))

    def cut(self, number: Tensor) -> tuple[Tensor, ...]:
        columns = self._columns(self._words.index_select(0, number))
        return tuple(
            column.view(self._mine, *shape)
            for column, shape in zip(columns, self._shapes, strict=True)
        )

    def _columns(self, words: Tensor) -> list[Tensor]:
        """A row of each for every batch."""
        raw = words.view(torch.uint8)
        places = zip(self._places, self._kinds, strict=True)
        return [raw[:, place].view(kind) for place, kind in places]


class StepGraph:
    """`body` takes a batch and returns what is told of the step, a row of numbers."""

    def __init__(
        self, body: Callable[[tuple[Tensor, ...]], Tensor], cut: Cut, capacity: int, row: int
    ) -> None:
        self._mine = cut.mine
        self._blocks = Blocks(cut, capacity)
        device = cut.block[0].device
        self._ring = torch.zeros(RING, row, device=device)
        self._at = torch.zeros(2, dtype=torch.int64, device=device)
        """The batch in the block, the place in the ring."""
        self._loaded: tuple[Tensor, ...] | None = None
        self._next = -1
        self.count = 0
        """Steps in the ring."""
        self._graph = torch.cuda.CUDAGraph()
        # A snapshot may be on its way to memory by another thread: only this one is bound.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            told = body(self._blocks.cut(self._at[:1]))
            self._ring.index_copy_(0, self._at[1:], told.float().view(1, row))
            self._at.add_(1)

    def replay(self, cut: Cut) -> None:
        if cut.block is not self._loaded:
            self._blocks.load(cut.block)
            self._loaded, self._next = cut.block, -1
        if cut.start != self._next:
            self._at[0].fill_(cut.start // self._mine)
        self._graph.replay()
        self._next = cut.start + self._mine
        self.count += 1

    def told(self) -> Tensor:
        """What the steps since the last reading left, on the device."""
        rows = self._ring[: self.count].clone()
        self._at[1].zero_()
        self.count = 0
        return rows
