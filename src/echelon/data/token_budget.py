"""Batches of samples of similar length, under a budget of tokens.

Samples are in buckets by length. In every epoch the samples of each bucket are shuffled, the
buckets are put one after the other, the shortest first, and the row is cut into batches; then the
batches are shuffled. Where it is cut depends on how many samples each bucket has, and on nothing
else: so every epoch has as many batches, of the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from echelon.data.sample_order import map_positions
from echelon.errors import EchelonError, Fault

_BUCKET_GROWTH = 1.1
"""The longest length of a bucket by that of the one before it. More would shuffle better, and pad
more: a sample is padded by a tenth at most, but for those at the border of two buckets."""


class TokenBudgetSampler(Sampler[list[int]]):
    """A batch sampler: samples of similar length meet in a batch, which has at most `max_tokens`
    tokens when it is padded to its longest sample. Every sample comes once an epoch.

        lengths = [len(tokens) for tokens in dataset]
        sampler = echelon.data.TokenBudgetSampler(lengths, max_tokens=16384)
        echelon.Experiment(..., train_data=dataset, batch_sampler=sampler, collate_fn=pad)

    lengths      The tokens of each sample of the data, in its order: a list, an array or a tensor.
    max_tokens   The budget of a batch: its number of samples times its longest one. A batch is that
                 of all processes together; each takes its share of the samples.
    max_samples  The most samples of a batch; without it, as many as the budget takes.
    generator    What the order is drawn from, as in samplers of torch; without it, torch's own. In
                 a training of Echelon both are seeded by (seed, epoch).

    The sizes of batches are the same in every epoch. Which samples meet, and the order of batches,
    are drawn anew. `sampler.padding_share` is the share of padding in all batches, at most.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any] | Tensor,
        *,
        max_tokens: int,
        max_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        counts = _read_lengths(lengths, max_tokens, max_samples)
        self.max_tokens, self.max_samples, self.generator = max_tokens, max_samples, generator
        self.samples = len(counts)
        self.tokens = int(counts.sum(dtype=np.int64))
        borders = _make_borders(int(counts.min()), int(counts.max()))
        # As narrow as can be: numpy sorts such numbers in a few passes.
        kind = np.min_scalar_type(len(borders))
        self._buckets = borders.searchsorted(counts).astype(kind)
        self._sizes, padded = _cut_batches(counts, self._buckets, max_tokens, max_samples)
        self.padding_share = 1 - self.tokens / padded

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        indices, sizes = self.draw_epoch()
        for stop, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
            yield indices[stop - size : stop].tolist()

    def draw_epoch(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples of an epoch in order, and how many each batch has."""
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        shuffled = map_positions(torch.arange(self.samples), self.samples, seed, 0).numpy()
        row = shuffled[self._buckets[shuffled].argsort(kind="stable")]
        count = len(self._sizes)
        order = map_positions(torch.arange(count), count, seed, 0, "batches/").numpy()
        starts = np.cumsum(self._sizes) - self._sizes
        sizes = self._sizes[order]
        # Place p of batch b comes from starts[order[b]] + p.
        moved = np.repeat(starts[order] - (np.cumsum(sizes) - sizes), sizes)
        return row[moved + np.arange(self.samples)], sizes

    def describe(self) -> str:
        """Return what decides the batches, for a resumed run to compare."""
        most = "" if self.max_samples is None else f" and {self.max_samples:,} samples"
        what = f"{self.samples:,} samples of {self.tokens:,} tokens, in {len(self):,} batches"
        return f"{what} of at most {self.max_tokens:,} tokens{most}"


def _read_lengths(lengths: Any, max_tokens: Any, max_samples: Any) -> NDArray[Any]:
    """Return the lengths as an array, at least 1 each. Raises all faults of what was given."""
    faults = []
    for name, value in (("max_tokens", max_tokens), ("max_samples", max_samples)):
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (is_number and value >= 1) and not (name == "max_samples" and value is None):
            faults.append(Fault(f"{name}={value!r}", "give a whole number, at least 1"))
    counts = np.asarray(lengths)
    remedy = "give the number of tokens of each sample, in the order of the data"
    if counts.ndim != 1 or not counts.size:
        what = f"lengths has the shape {counts.shape}" if counts.size else "lengths is empty"
        faults.append(Fault(what, remedy))
    elif counts.dtype.kind not in "iu":
        faults.append(Fault(f"lengths has numbers of type {counts.dtype}", remedy))
    elif counts.min() < 0:
        sample = int(counts.argmin())
        faults.append(Fault(f"the length of sample {sample} is {counts[sample]}", remedy))
    elif not faults and counts.max() > max_tokens:
        longest, too_long = int(counts.argmax()), int((counts > max_tokens).sum())
        also = f"; {too_long:,} samples are longer than that" if too_long > 1 else ""
        faults.append(
            Fault(
                f"sample {longest} has {counts[longest]:,} tokens, more than max_tokens="
                f"{max_tokens}{also}",
                f"raise max_tokens to {counts[longest]} or more, or cut or leave out such samples",
            )
        )
    if faults:
        raise EchelonError(*faults)
    at_least_one: NDArray[Any] = np.maximum(counts, 1)
    return at_least_one


def _make_borders(shortest: int, longest: int) -> NDArray[np.int64]:
    """Return the longest length of each bucket, ascending."""
    borders = [shortest]
    while borders[-1] < longest:
        borders.append(max(borders[-1] + 1, int(borders[-1] * _BUCKET_GROWTH)))
    return np.array(borders)


def _cut_batches(
    lengths: NDArray[Any], buckets: NDArray[Any], max_tokens: int, max_samples: int | None
) -> tuple[NDArray[np.int64], int]:
    """Return the sizes of all batches, and the tokens of all when they are padded, at most.

    A bucket is cut into batches of as many samples as the budget takes of its longest one. What is
    left at its end begins a batch of the next bucket, unless it is too much for that already.
    """
    counts = np.bincount(buckets)
    starts = np.cumsum(counts) - counts
    used = counts > 0
    ordered = lengths[buckets.argsort(kind="stable")]
    longest = np.maximum.reduceat(ordered, starts[used]).tolist()
    sizes: list[NDArray[np.int64]] = []
    left, width, padded = 0, 0, 0  # samples that are in no batch yet, and the longest of them
    for count, length in zip(counts[used].tolist(), longest, strict=True):
        full = max_tokens // length
        if max_samples is not None:
            full = min(full, max_samples)
        if left >= full:
            sizes.append(np.array([left]))
            padded += left * width
            left = 0
        batches, left = divmod(left + count, full)
        sizes.append(np.full(batches, full))
        padded += batches * full * length
        width = length
    if left:
        sizes.append(np.array([left]))
        padded += left * width
    return np.concatenate(sizes).astype(np.int64), padded
