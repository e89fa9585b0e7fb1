"""The order of samples as a function of (seed, epoch, position).

A shuffled list of N indices takes time and memory in proportion to N, on every rank, and must be
rebuilt to resume. Here position ``p`` of an epoch maps to its sample by a keyed permutation of
``range(size)``, computed index by index. Nothing of length N exists, and any position is reached at
once. Neither the rank nor the world size enters, so a run that is resumed on another number of
ranks continues in the same order.

The order is part of what a snapshot promises. Changing the rounds, the shift or the derivation of
keys changes every resumed run; ``tests/data/test_sample_order.py`` pins some values for that
reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_128
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.kernels import can_use_kernels

_MAX_ROUNDS = 12

_FIRST_BLOCK_SAMPLES = 1 << 10
"""Small, so that the first batch of an epoch is ready in well under a millisecond."""

_BLOCK_SAMPLES = 1 << 17
"""Large enough to hide the cost of the many small calls in `_walk_into_range`: with blocks of 32k
they took more than half of the time."""

_BLOCK_SAMPLES_CUDA = 1 << 22
"""On a GPU, drawing costs little more than the call, and the call makes steps wait."""

_MAX_WALKS = 256
"""At worst a walk leaves half of the values outside, so 2**40 of them need about 40 walks. Only a
position that is outside itself can need more: it may be on a cycle that is all outside."""

_CHUNK_VALUES = 1 << 15
"""Values that are mixed at a time on a CPU; they stay in its second-level cache."""


def map_positions(positions: Tensor, size: int, seed: int, epoch: int, purpose: str = "") -> Tensor:
    """Return the samples at these positions of the epoch: int64, of the same shape and device.

    Another `purpose` gives another permutation of the same epoch, such as one of chunks.
    Positions outside ``range(size)`` give indices that belong to other positions or are outside as
    well. They are not checked, as that would make a GPU wait. Without Triton a GPU waits once per
    walk (see `_walk_into_range`), unless the size is a power of two.
    """
    permutation = _KeyedPermutation(size, seed, epoch, purpose)
    if can_use_kernels(positions):
        from echelon.kernels.sample_order import map_positions_on_gpu

        keys = permutation.make_key_tensor().to(positions.device)
        return map_positions_on_gpu(
            positions, keys, size, permutation.domain, permutation.fold_bits, _MAX_WALKS
        )
    values = positions.reshape(-1).to(permutation.word, copy=True)
    # numpy arrays and tensors have the same operators, and numpy's take half as long to call.
    array = values.numpy() if values.device.type == "cpu" else values
    permutation.apply(array)
    if size < permutation.domain:
        _walk_into_range(array, size, permutation)
    return values.to(torch.int64).view(positions.shape)


class _KeyedPermutation:
    """A keyed permutation of the smallest power of two that holds ``range(size)``.

    Each round multiplies by an odd number, adds, and folds the upper half of the bits onto the
    lower half. All three can be undone modulo the power of two, whatever the keys, so no two
    positions map to the same value. Multiplication carries bits upwards only and the fold moves
    them downwards only; both are needed. This mixes more per operation than a Feistel network,
    which hashes half of the bits per round.
    """

    def __init__(self, size: int, seed: int, epoch: int, purpose: str = "") -> None:
        bits = max(1, (size - 1).bit_length())
        self.domain = 1 << bits
        # Half the bytes is twice the speed, and enough for data sets of up to 2**31 samples. Such a
        # word holds every sample, but not the size 2**31 itself: compare with the last sample.
        self.word = torch.int32 if bits < 32 else torch.int64
        fold_bits = max(1, bits // 2)
        keys = _derive_keys(seed, epoch, purpose)[: 2 * _choose_rounds(bits)]
        self._factors = [key % self.domain | 1 for key in keys[::2]]
        self._terms = [key % self.domain for key in keys[1::2]]
        self.fold_bits, self._fold_mask = fold_bits, (self.domain - 1) >> fold_bits

    def make_key_tensor(self) -> Tensor:
        """Return the factor and the term of every round, in turn."""
        pairs = zip(self._factors, self._terms, strict=True)
        return torch.tensor([key for pair in pairs for key in pair], dtype=self.word)

    def apply(self, values: Any) -> Any:
        """Overwrites and returns ``values``, an array or a tensor.

        Products overflow and wrap around on every device. Bits above the domain never reach the
        bits below, so they are cleared once, at the end.
        """
        length = len(values)
        step = _CHUNK_VALUES if isinstance(values, np.ndarray) else max(1, length)
        for start in range(0, length, step):
            piece = values[start : start + step]
            for factor, term in zip(self._factors, self._terms, strict=True):
                piece *= factor
                piece += term
                upper = piece >> self.fold_bits
                upper &= self._fold_mask
                piece ^= upper
            piece &= self.domain - 1
        return values


def _choose_rounds(bits: int) -> int:
    """Return the number of rounds for a domain of so many bits.

    Few bits mix little per round, and small data sets can afford more rounds. Measured over 100 000
    random keys: from 10 rounds on, all permutations of 4 and of 8 samples come equally often. From
    16 bits on, 6 rounds leave no trace in pairs, differences or serial correlation, 4 hardly any, 3
    a clear one. A round takes about half a nanosecond per sample.
    """
    return _MAX_ROUNDS if bits < 16 else 6


def _derive_keys(seed: int, epoch: int, purpose: str = "") -> tuple[int, ...]:
    """Return the keys of an epoch: a hash, so that seed 1 in epoch 0 does not resemble seed 0 in
    epoch 1."""
    digest = shake_128(f"{purpose}{seed}/{epoch}".encode()).digest(16 * _MAX_ROUNDS)
    return struct.unpack(f"<{2 * _MAX_ROUNDS}Q", digest)


def _walk_into_range(values: Any, size: int, permutation: _KeyedPermutation) -> None:
    """Applies the permutation again to values outside ``range(size)`` until they are inside.

    This keeps the mapping one to one ("cycle walking"). At worst, for a size just above a power of
    two, half of the values are outside after each walk: n values take about log2(n) ever smaller
    walks, and a sample takes four times as long as where none is outside.
    """
    last = size - 1
    outside = _find_true(values > last)
    for _ in range(_MAX_WALKS - 1):  # the caller has done the first walk
        if not len(outside):
            return
        walked = permutation.apply(values[outside])
        values[outside] = walked
        outside = outside[walked > last]


def _find_true(mask: Any) -> Any:
    """Return the positions that are True; numpy takes a tenth of torch's time on a CPU."""
    return np.flatnonzero(mask) if isinstance(mask, np.ndarray) else mask.nonzero().squeeze(1)


@dataclass(frozen=True)
class SampleRange:
    """The positions ``[start, stop)`` of the epoch that one rank takes of one global batch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def compute_share(
    batch: int, batch_size: int, size: int, rank: int, world_size: int
) -> SampleRange:
    """Return a rank's share of a global batch.

    Shares are contiguous, so that the ranks in turn give the global batch in order at any world
    size. They differ by at most one sample and can be empty, above all in the last batch: gradients
    must be weighted by samples, not by ranks. Rank 0's is never empty, because buffers are rank
    0's: those of a step in which it saw no sample would stay as they were.
    """
    start = min(batch * batch_size, size)
    share = cut_share(min(batch_size, size - start), rank, world_size)
    return SampleRange(start + share.start, start + share.stop)


def cut_share(length: int, rank: int, world_size: int) -> SampleRange:
    """Return which of the `length` samples of a global batch a rank takes."""
    first, stop = (-(-length * each // world_size) for each in (rank, rank + 1))  # rounded up
    return SampleRange(first, stop)


def count_batches(size: int, batch_size: int) -> int:
    """Return the batches of an epoch, with the last, partial one: no sample is dropped or
    repeated."""
    return -(-size // batch_size)


@dataclass(frozen=True)
class EpochOrder:
    """The indices of one rank through one epoch, in blocks of many batches.

    A block keeps the cost of calling torch from being paid for every batch. It holds about 128k
    indices (4 M on a GPU), or one batch where that is more.
    """

    size: int
    batch_size: int
    rank: int
    world_size: int
    seed: int
    epoch: int
    shuffle: bool = True
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"no rank takes a share of such batches: {self}")

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the indices of a run of global batches, joined, and how many of them belong to
        each batch.

        Runs begin and end at the same batches on every rank, also where a rank's share is empty.
        Starting at any batch costs the same. Where runs end depends on the first batch; the order
        does not.
        """
        samples = _FIRST_BLOCK_SAMPLES
        last = count_batches(self.size, self.batch_size)
        while first_batch < last:
            stop = self._find_run_end(first_batch, samples)
            yield self._draw_indices(first_batch, stop)
            first_batch, samples = stop, min(4 * samples, self._max_block_samples)

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the same: no sample comes twice in an epoch, so its index is what it is seeded
        by."""
        return self.iter_blocks(first_batch)

    def count_samples(self, batch: int) -> int:
        """Return the samples of a global batch; the last one of an epoch may have fewer."""
        return min(self.batch_size, self.size - batch * self.batch_size)

    @property
    def _max_block_samples(self) -> int:
        """The largest block on this device."""
        return _BLOCK_SAMPLES if torch.device(self.device).type == "cpu" else _BLOCK_SAMPLES_CUDA

    def _find_run_end(self, first: int, samples: int) -> int:
        """Return the batch after the run that starts at `first`.

        The partial last batch is a run of its own, so that all batches of a run have the same size.
        """
        full = self.size // self.batch_size
        if first >= full:
            return first + 1
        largest_share = -(-self.batch_size // self.world_size)
        return min(full, first + max(1, samples // largest_share))

    def _draw_indices(self, first: int, stop: int) -> tuple[Tensor, list[int]]:
        """Return this rank's indices of a run of batches, and the number of them in each batch."""
        share = compute_share(first, self.batch_size, self.size, self.rank, self.world_size)
        within = torch.arange(share.start, share.stop, device=self.device)
        offsets = torch.arange(stop - first, device=self.device) * self.batch_size
        positions = (offsets.unsqueeze(1) + within).flatten()
        counts = [len(share)] * (stop - first)
        return self.map_positions(positions) if self.shuffle else positions, counts

    def map_positions(self, positions: Tensor) -> Tensor:
        """Return the samples at these positions of the epoch."""
        return map_positions(positions, self.size, self.seed, self.epoch)
