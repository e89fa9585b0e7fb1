"""A training step as one CUDA graph: cut the batch, forward, backward, all-reduce, clip, optimizer.

A small step is made of dozens of kernels that each run shorter than the host needs to start them.
Captured once and replayed, they follow each other at the speed of the chip. The graph finds its
batch by a counter on the device, in a block of many batches that is copied in when it is used up,
and leaves its loss in a ring that is read every few steps; the host starts it and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.data.batches import Cut

RING = 64
"""Steps between two readings."""


class StepGraph:
    """`body` takes a batch and returns what is told of the step, a row of numbers."""

    def __init__(
        self, body: Callable[[tuple[Tensor, ...]], Tensor], cut: Cut, capacity: int, row: int
    ) -> None:
        self._mine = cut.mine
        self._blocks = tuple(t.new_empty((capacity, *t.shape[1:])) for t in cut.block)
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
            told = body(tuple(self._cut(block) for block in self._blocks))
            self._ring.index_copy_(0, self._at[1:], told.float().view(1, row))
            self._at.add_(1)

    def _cut(self, block: Tensor) -> Tensor:
        batches = block.view(-1, self._mine, *block.shape[1:])
        return batches.index_select(0, self._at[:1]).squeeze(0)

    def replay(self, cut: Cut) -> None:
        if cut.block is not self._loaded:
            self._load(cut.block)
        if cut.start != self._next:
            self._at[0].fill_(cut.start // self._mine)
        self._graph.replay()
        self._next = cut.start + self._mine
        self.count += 1

    def _load(self, block: tuple[Tensor, ...]) -> None:
        for kept, new in zip(self._blocks, block, strict=True):
            kept[: len(new)].copy_(new)
        self._loaded, self._next = block, -1

    def told(self) -> Tensor:
        """What the steps since the last reading left, on the device."""
        rows = self._ring[: self.count].clone()
        self._at[1].zero_()
        self.count = 0
        return rows
