"""Which batches every epoch has: a shuffle of the data, or those of the experiment's own sampler.

A plan knows the global order; every rank cuts its share out of it. Of a sampler (`sampler_plan.py`)
the order is read for a whole epoch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.data.chunk_order import ChunkedOrder, ChunkWindows, find_chunk_windows
from echelon.data.data_layout import DataLayout, describe_layout
from echelon.data.document_packing import PackedDocuments
from echelon.data.mixture import Mixture, MixtureDraws, MixtureOrder
from echelon.data.sample_order import EpochOrder, count_batches
from echelon.errors import EchelonError, Fault


class TrainOrder(Protocol):
    """One rank's samples through one epoch; a `BatchOrder` that knows the global batches."""

    @property
    def seed(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]: ...

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]: ...

    def count_samples(self, batch: int) -> int:
        """Return the samples of a global batch."""
        ...


class EpochPlan(Protocol):
    """The batches of all epochs."""

    @property
    def epoch_samples(self) -> int:
        """The samples of the first epoch."""
        ...

    @property
    def layout(self) -> DataLayout:
        """What decides the order besides the seed."""
        ...

    def count_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        ...

    def locate(self, step: int, samples: int) -> tuple[int, int]:
        """Return the epoch, from 0, and the batch in it that follow so many steps and samples."""
        ...

    def count_partial_samples(self, samples: int) -> int:
        """Return by how many samples a position is not at the border of two batches, as it may be
        where the batch size has changed."""
        ...

    def make_order(
        self, epoch: int, rank: int, world_size: int, device: torch.device
    ) -> TrainOrder:
        """Return a rank's samples of an epoch, with indices on a device."""
        ...


def make_epoch_plan(
    size: int,
    batch_size: int,
    seed: int,
    sampler: Any = None,
    batch_sampler: Any = None,
    data: Any = None,
) -> EpochPlan:
    """Return the plan of a training over `size` samples, those of `data`, which may say how it is
    to be ordered. A sampler is read at once, for the first epoch, so that what is wrong with it is
    found before anything is computed."""
    is_sampled = sampler is not None or batch_sampler is not None
    if isinstance(data, Mixture):
        if is_sampled:
            raise EchelonError(
                Fault(
                    "a sampler is given beside a mixture, which has an order of its own",
                    "leave out the sampler, or give the sources without echelon.data.mix",
                )
            )
        draws = MixtureDraws(data, seed)
        return MixturePlan(data.epoch_samples, batch_size, seed, mixture=data, draws=draws)
    if not is_sampled:
        grouping = data.grouping if isinstance(data, PackedDocuments) else ""
        return ShuffledPlan(size, batch_size, seed, find_chunk_windows(data), grouping)
    from echelon.data.sampler_plan import SamplerPlan

    return SamplerPlan(size, batch_size, seed, sampler, batch_sampler)


@dataclass(frozen=True)
class ShuffledPlan:
    """Every sample once an epoch, in an order that is drawn anew for each."""

    epoch_samples: int
    batch_size: int
    seed: int
    windows: ChunkWindows | None = None
    """Of data that lies in chunks and is larger than a window."""
    grouping: str = ""
    """How documents were packed into samples."""

    @property
    def layout(self) -> DataLayout:
        """The number of samples, and the chunks and windows that are shuffled."""
        return describe_layout(self.epoch_samples, self.windows)._replace(grouping=self.grouping)

    def count_batches(self, epoch: int) -> int:
        """Return the number of batches, which is the same in every epoch."""
        return count_batches(self.epoch_samples, self.batch_size)

    def locate(self, step: int, samples: int) -> tuple[int, int]:
        """Return the epoch and the batch after so many samples; steps may have been of another
        size."""
        epoch, offset = divmod(samples, self.epoch_samples)
        return epoch, offset // self.batch_size

    def count_partial_samples(self, samples: int) -> int:
        """Return the samples since the last border of two batches."""
        return samples % self.epoch_samples % self.batch_size

    def make_order(
        self, epoch: int, rank: int, world_size: int, device: torch.device
    ) -> EpochOrder:
        """Return a rank's samples of an epoch."""
        place = (self.epoch_samples, self.batch_size, rank, world_size, self.seed, epoch)
        if self.windows is not None:
            return ChunkedOrder(*place, device=device, windows=self.windows)
        return EpochOrder(*place, device=device)


@dataclass(frozen=True, kw_only=True)
class MixturePlan(ShuffledPlan):
    """As many draws from a mixture in every epoch; the next epoch goes on where one has ended."""

    mixture: Mixture
    draws: MixtureDraws

    @property
    def layout(self) -> DataLayout:
        """The sources with their sizes and weights."""
        return DataLayout(len(self.mixture), mixture=self.mixture.describe())

    def make_order(
        self, epoch: int, rank: int, world_size: int, device: torch.device
    ) -> MixtureOrder:
        """Return a rank's samples of an epoch."""
        place = (self.epoch_samples, self.batch_size, rank, world_size, self.seed, epoch)
        return MixtureOrder(*place, device=device, draws=self.draws, rows=len(self.mixture))
