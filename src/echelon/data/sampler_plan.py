"""The order of an experiment's own `sampler` or `batch_sampler`, as torch's DataLoader takes them.

The sampler gives the global order, on every rank the same, and ranks cut their shares out of it. It
must give the same order whenever it is asked for the same epoch: then a run can be resumed within
an epoch, at any world size. So everything it may draw from is seeded by (seed, epoch) before, and
it is asked twice for the first epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.data.data_layout import DataLayout
from echelon.data.sample_order import count_batches, cut_share
from echelon.data.sample_seeds import derive_seeds, keep_generators, seed_generators
from echelon.data.token_budget import TokenBudgetSampler
from echelon.errors import EchelonError, Fault

_BLOCK_SAMPLES = 1 << 15
"""Indices of a block, or of one batch where that has more."""
_SEED_NUMBER = 1 << 63
"""The number of no sample: what a sampler draws is seeded as if it were one."""
_REPEAT_REMEDY = (
    "draw from `random`, numpy, torch or the sampler's attribute `generator`, which are seeded for "
    "every epoch, or from the epoch that its method `set_epoch` is given"
)
_LENGTH_REMEDY = (
    "give as many in every epoch, or let len() say how many after set_epoch(epoch): steps are "
    "counted by it"
)


class DrawnEpoch(NamedTuple):
    """What a sampler gave for one epoch."""

    draws: Tensor
    """The samples in order. One that comes again in the epoch has the number of samples added, as
    often as it came before: so it draws other random numbers."""
    batch_sizes: list[int]


class SamplerPlan:
    """The epochs of a sampler, in batches of `batch_size`, or those of a batch sampler."""

    def __init__(
        self, size: int, batch_size: int, seed: int, sampler: Any, batch_sampler: Any
    ) -> None:
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._gives_batches = batch_sampler is not None
        self._sampler = batch_sampler if self._gives_batches else sampler
        self.title = "batch_sampler" if self._gives_batches else "sampler"
        self._unit = "batches" if self._gives_batches else "samples"
        self._own = batch_sampler if isinstance(batch_sampler, TokenBudgetSampler) else None
        """One of ours: it repeats, and gives every sample once."""
        if self._own is not None and self._own.samples != size:
            raise _make_sampler_error(
                f"the batch_sampler has the lengths of {self._own.samples:,} samples, but the "
                f"data has {size:,}",
                "give one length for each sample, in the order of the data",
            )
        self._lengths: dict[int, int] = {}
        self._epoch_start = (0, 0)
        """An epoch and the units before it; the search for a later position goes on from there."""
        first = self._read_epoch(0)
        again = self._read_epoch(0) if self._own is None else first
        if first.batch_sizes != again.batch_sizes or not torch.equal(first.draws, again.draws):
            raise _make_sampler_error(
                f"the {self.title} gives another order when it is asked again for the "
                "same epoch, so a resumed run would not repeat",
                _REPEAT_REMEDY,
            )
        self._lengths[0] = self._count_units(first)
        self._drawn = (0, first)
        self.epoch_samples = len(first.draws)
        self.layout = DataLayout(size, grouping="" if self._own is None else self._own.describe())
        """Its chunks do not matter: the sampler decides the order."""

    def count_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        length = self._get_length(epoch)
        return length if self._gives_batches else count_batches(length, self._batch_size)

    def locate(self, step: int, samples: int) -> tuple[int, int]:
        """Return the epoch and the batch that follow so many steps and samples.

        Batches of a batch sampler may have any size, so there steps count.
        """
        epoch, offset = self._find_offset(step if self._gives_batches else samples)
        return epoch, offset if self._gives_batches else offset // self._batch_size

    def count_partial_samples(self, samples: int) -> int:
        """Return the samples since the last border of two batches."""
        return 0 if self._gives_batches else self._find_offset(samples)[1] % self._batch_size

    def make_order(
        self, epoch: int, rank: int, world_size: int, device: torch.device
    ) -> SamplerOrder:
        """Return a rank's samples of an epoch."""
        return SamplerOrder(
            self._draw_epoch(epoch), self._size, rank, world_size, self._seed, epoch, device
        )

    def compute_digest(self) -> str:
        """Return a hash of the first epoch, to compare between ranks."""
        drawn = self._draw_epoch(0)
        sizes = np.array(drawn.batch_sizes)
        return blake2b(drawn.draws.numpy().tobytes() + sizes.tobytes(), digest_size=8).hexdigest()

    def _find_offset(self, units: int) -> tuple[int, int]:
        """Return the epoch of a position, and the units of it that are done."""
        epoch, start = self._epoch_start
        if units < start:
            epoch, start = 0, 0
        while units >= start + self._get_length(epoch):
            start += self._get_length(epoch)
            epoch += 1
        self._epoch_start = (epoch, start)
        return epoch, units - start

    def _get_length(self, epoch: int) -> int:
        """Return the units of an epoch: what the sampler says where it can be asked, otherwise as
        many as in the first epoch."""
        if epoch not in self._lengths:
            if not hasattr(self._sampler, "set_epoch"):
                return self._lengths[0]
            if hasattr(self._sampler, "__len__"):
                self._sampler.set_epoch(epoch)
                self._lengths[epoch] = len(self._sampler)
            else:
                self._lengths[epoch] = self._count_units(self._draw_epoch(epoch))
        return self._lengths[epoch]

    def _draw_epoch(self, epoch: int) -> DrawnEpoch:
        """Return what the sampler gives for an epoch; the last one is kept."""
        if self._drawn[0] != epoch:
            drawn = self._read_epoch(epoch)
            self._drawn = (epoch, drawn)
            if (count := self._count_units(drawn)) != (length := self._get_length(epoch)):
                raise _make_sampler_error(
                    f"the {self.title} gives {count:,} {self._unit} in epoch "
                    f"{epoch + 1}, where {length:,} were expected",
                    _LENGTH_REMEDY,
                )
        return self._drawn[1]

    def _count_units(self, drawn: DrawnEpoch) -> int:
        return len(drawn.batch_sizes) if self._gives_batches else len(drawn.draws)

    def _read_epoch(self, epoch: int) -> DrawnEpoch:
        """Asks the sampler for an epoch and checks what it gives."""
        [seed] = derive_seeds(self._seed, epoch, np.array([_SEED_NUMBER], np.uint64))
        with keep_generators():
            seed_generators(seed)
            _seed_sampler(self._sampler, seed, epoch)
            batch_sizes, indices = self._read_indices()
        outside = np.flatnonzero((indices < 0) | (indices >= self._size))
        if len(outside):
            raise _make_sampler_error(
                f"the {self.title} gives the index {indices[outside[0]]} in epoch "
                f"{epoch + 1}, but the data has {self._size:,} samples",
                f"give indices from 0 to {self._size - 1}",
            )
        if 0 in batch_sizes or not len(indices):
            what = f"an empty batch (number {batch_sizes.index(0)})" if batch_sizes else "nothing"
            raise _make_sampler_error(
                f"the {self.title} gives {what} in epoch {epoch + 1}",
                "give at least one sample",
            )
        if not self._gives_batches:
            starts = range(0, len(indices), self._batch_size)
            batch_sizes = [min(self._batch_size, len(indices) - start) for start in starts]
        if self._own is None:
            indices = _number_repeats(indices, self._size)
        return DrawnEpoch(torch.from_numpy(indices), batch_sizes)

    def _read_indices(self) -> tuple[list[int], Any]:
        """Return the sizes of the batches that a batch sampler gives, and the indices as an
        array."""
        if not self._gives_batches:
            return [], np.fromiter(self._iter_indices(self._sampler), np.int64)
        if self._own is not None:
            drawn, sizes = self._own.draw_epoch()
            return sizes.tolist(), drawn
        batches = [list(self._iter_indices(batch)) for batch in self._sampler]
        joined = (index for batch in batches for index in batch)
        return [len(batch) for batch in batches], np.fromiter(joined, np.int64)

    def _iter_indices(self, given: Iterable[Any]) -> Iterator[int]:
        if not isinstance(given, Iterable):
            raise _make_sampler_error(
                f"the batch_sampler gives a {type(given).__name__} for a batch",
                "give lists of indices; a sampler gives one index at a time",
            )
        for each in given:
            try:
                index = operator.index(each)
            except TypeError:
                raise _make_sampler_error(
                    f"the {self.title} gives a {type(each).__name__} for an index",
                    "give whole numbers; a batch_sampler gives lists of them",
                ) from None
            yield index


@dataclass(frozen=True)
class SamplerOrder:
    """The indices of one rank through one epoch of a sampler."""

    drawn: DrawnEpoch
    size: int
    rank: int
    world_size: int
    seed: int
    epoch: int
    device: torch.device

    def count_samples(self, batch: int) -> int:
        """Return the samples of a global batch."""
        return self.drawn.batch_sizes[batch]

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the indices of a run of global batches, joined, and how many belong to each."""
        for draws, counts in self.iter_draws(first_batch):
            yield (draws % self.size).to(self.device), counts

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the same with the numbers that samples are seeded by."""
        sizes = self.drawn.batch_sizes
        start = sum(sizes[:first_batch])
        pieces: list[Tensor] = []
        block_samples = 0
        for number in range(first_batch, len(sizes)):
            share = cut_share(sizes[number], self.rank, self.world_size)
            pieces.append(self.drawn.draws[start + share.start : start + share.stop])
            start += sizes[number]
            block_samples += len(share)
            if block_samples >= _BLOCK_SAMPLES or number == len(sizes) - 1:
                yield torch.cat(pieces), [len(piece) for piece in pieces]
                pieces, block_samples = [], 0


def _seed_sampler(sampler: Any, seed: int, epoch: int) -> None:
    """Tells a sampler, and those that it is made of, which epoch comes."""
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed)
    if (inner := getattr(sampler, "sampler", None)) is not None and inner is not sampler:
        _seed_sampler(inner, seed, epoch)


def _number_repeats(indices: Any, size: int) -> Any:
    """Return every index with `size` added as often as it came before."""
    by_index = np.argsort(indices, kind="stable")
    ordered, places = indices[by_index], np.arange(len(indices))
    is_first = np.ones(len(indices), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    repeats = np.empty_like(indices)
    repeats[by_index] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return indices + size * repeats


def _make_sampler_error(what: str, do: str) -> EchelonError:
    return EchelonError(Fault(what, do))
