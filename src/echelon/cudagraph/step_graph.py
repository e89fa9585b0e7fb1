"""A training step as one CUDA graph: select the batch, forward, backward, all-reduce, clip,
optimizer.

A small step consists of dozens of kernels that each run shorter than the host needs to launch them.
Captured once and replayed, they follow each other at the speed of the GPU. The graph finds its
batch by a counter on the device, in a block of many batches that is copied in when the previous one
is used up. It leaves its results in a ring buffer that is read every few steps; the host launches
the graph and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from echelon.data.batches import BlockSlice

RING_STEPS = 64
"""Steps that the ring buffer holds, so it must be read at least that often."""

_ALIGN_BYTES = 256
"""Every column of a batch is aligned as if it had been allocated alone."""


class BatchBlocks:
    """Many batches in one buffer, each with its columns one after the other, so that one copy
    selects a batch."""

    def __init__(self, block_slice: BlockSlice, capacity: int) -> None:
        self._batch_samples = block_slice.sample_count
        self._shapes = [t.shape[1:] for t in block_slice.block]
        self._dtypes = [t.dtype for t in block_slice.block]
        sizes = [t[:1].nbytes * block_slice.sample_count for t in block_slice.block]
        ends = accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
        starts = [0, *ends]
        self._column_bytes = [
            slice(start, start + n) for start, n in zip(starts, sizes, strict=False)
        ]
        words = max(_ALIGN_BYTES, starts[-1]) // torch.int64.itemsize
        self._words = torch.empty(
            (capacity // block_slice.sample_count, words),
            dtype=torch.int64,
            device=block_slice.block[0].device,
        )

    def fits(self, block: tuple[Tensor, ...]) -> bool:
        """Return whether a block has the columns that the buffer was made for."""
        return [t.shape[1:] for t in block] == self._shapes and [
            t.dtype for t in block
        ] == self._dtypes

    def load(self, block: tuple[Tensor, ...]) -> None:
        """Copies a block's full batches into the buffer. A smaller last batch is not the
        graph's."""
        count = len(block[0]) // self._batch_samples
        for column, stored in zip(block, self._view_columns(self._words[:count]), strict=True):
            stored.copy_(column[: count * self._batch_samples].reshape(stored.shape))

    def select_batch(self, batch_index: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of one batch; its index is a tensor on the device, which the graph
        counts up."""
        columns = self._view_columns(self._words.index_select(0, batch_index))
        return tuple(
            column.view(self._batch_samples, *shape)
            for column, shape in zip(columns, self._shapes, strict=True)
        )

    def _view_columns(self, words: Tensor) -> list[Tensor]:
        """Return a view for each column, with one row per batch."""
        raw = words.view(torch.uint8)
        places = zip(self._column_bytes, self._dtypes, strict=True)
        return [raw[:, place].view(kind) for place, kind in places]


class StepGraph:
    """A captured step. `body` takes a batch and returns the step's result, a row of numbers."""

    def __init__(
        self,
        body: Callable[[tuple[Tensor, ...]], Tensor],
        block_slice: BlockSlice,
        capacity: int,
        result_width: int,
    ) -> None:
        self._batch_samples = block_slice.sample_count
        self._blocks = BatchBlocks(block_slice, capacity)
        device = block_slice.block[0].device
        self.ring_steps = RING_STEPS
        self._ring = torch.zeros(RING_STEPS, result_width, device=device)
        self._counters = torch.zeros(2, dtype=torch.int64, device=device)
        """Two counters on the device: the batch within the block, the position in the ring."""
        self._loaded_block: tuple[Tensor, ...] | None = None
        self._next_start = -1
        self.pending_steps = 0
        """Steps whose results are in the ring."""
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may be copying a snapshot to host memory, which a capture forbids. With
        # "thread_local" only this thread is restricted.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            result = body(self._blocks.select_batch(self._counters[:1]))
            self._ring.index_copy_(0, self._counters[1:], result.float().view(1, result_width))
            self._counters.add_(1)

    def fits(self, block_slice: BlockSlice) -> bool:
        """Return whether the step can be replayed for this batch."""
        is_known = block_slice.block is self._loaded_block
        return is_known or self._blocks.fits(block_slice.block)

    def replay(self, block_slice: BlockSlice) -> None:
        """Runs the step for this batch. Copies a new block in first, or moves the counter, where
        needed."""
        if block_slice.block is not self._loaded_block:
            self._blocks.load(block_slice.block)
            self._loaded_block, self._next_start = block_slice.block, -1
        if block_slice.start != self._next_start:
            self._counters[0].fill_(block_slice.start // self._batch_samples)
        self._graph.replay()
        self._next_start = block_slice.start + self._batch_samples
        self.pending_steps += 1

    def take_results(self) -> Tensor:
        """Return the results of the steps since the last call, still on the device, and empty
        the ring."""
        rows = self._ring[: self.pending_steps].clone()
        self._counters[1].zero_()
        self.pending_steps = 0
        return rows
