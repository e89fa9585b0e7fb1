"""The shares of batches that a rank works on in a user's loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from echelon.config.schema import Config
from echelon.data.bad_samples import BadSampleList
from echelon.data.batches import Batch, BatchSource, BlockSlice, make_source
from echelon.data.epoch_plan import EpochPlan
from echelon.data.loader_options import find_loader_faults
from echelon.data.sample_order import EpochOrder
from echelon.errors import EchelonError, Fault
from echelon.experiment.checks import find_collate_faults, find_sampler_faults
from echelon.parallel.process_group import RankGroup
from echelon.train.loop_arguments import require_positive
from echelon.train.train_data import describe_samples, open_train_data
from echelon.utils.text import format_count
from echelon.world import World


class Share(NamedTuple):
    """This rank's part of one batch."""

    data: Any
    sample_count: int
    """Samples that count; 0 where there is one only so that the loop has something to work on."""
    total: int
    """Samples of all ranks."""


@dataclass(frozen=True)
class LoopData:
    """The data of a loop, and which batches each of its epochs has."""

    source: BatchSource
    plan: EpochPlan
    description: str
    """In words: the samples and the batches."""


def open_loop_data(
    config: Config,
    group: RankGroup,
    device: torch.device,
    samples: int,
    bad_samples: BadSampleList | None,
    data: Any,
    batch_size: int | None,
    num_workers: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    **loader: Any,
) -> LoopData:
    """Return the data of a loop that continues after so many samples; the further arguments are
    those of `Session.batches`."""
    size = config.trainer.batch_size if batch_size is None else batch_size
    workers = config.trainer.loader_workers if num_workers is None else num_workers
    faults = [
        *find_collate_faults(collate_fn),
        *find_sampler_faults(sampler, batch_sampler),
        *find_loader_faults(loader),
    ]
    if faults:
        raise EchelonError(*faults)
    source, plan = open_train_data(
        config,
        group,
        device,
        data,
        "data",
        batch_size=size,
        workers=workers,
        collate_fn=collate_fn,
        sampler=sampler,
        batch_sampler=batch_sampler,
        options=loader,
        bad_samples=bad_samples,
    )
    if size < group.world.size and batch_sampler is None:
        raise EchelonError(
            Fault(
                f"batch_size={size}, but there are {group.world.size} processes",
                "give every process a sample of each batch: a larger batch size, or fewer "
                "processes",
            )
        )
    if plan.count_partial_samples(samples):
        raise EchelonError(
            Fault(
                f"batch_size={size}, but the snapshot was saved after {samples} samples, "
                "in the middle of a batch of this size",
                "keep the batch size, or use a snapshot from the end of an epoch",
            )
        )
    cut = "the batch_sampler" if batch_sampler is not None else f"{size:,}"
    what = describe_samples(source) or format_count(len(source), "sample")
    return LoopData(source, plan, f"{what} in batches of {cut}")


def iter_eval_shares(
    config: Config,
    world: World,
    device: torch.device,
    bad_samples: BadSampleList | None,
    data: Any,
    batch_size: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Generator[Share]:
    """Yield this rank's share of every batch of evaluation data, in order."""
    trainer = config.trainer
    require_positive(batch_size=batch_size)
    if faults := list(find_collate_faults(collate_fn)):
        raise EchelonError(*faults)
    size = batch_size or trainer.eval_batch_size or max(trainer.batch_size, world.size)
    workers = trainer.loader_workers
    source = make_source(data, "eval_data", workers, device, collate_fn, None, bad_samples)
    order = EpochOrder(len(source), size, world.rank, world.size, 0, 0, shuffle=False)
    try:
        for batch in source.iter_batches(order, 0, device):
            yield fill_share(source, batch, size, device)
    finally:
        source.close()


def fill_share(
    source: BatchSource, batch: Batch | BlockSlice, total: int, device: torch.device
) -> Share:
    """Return a share as the loop gets it: without a sample of its own, this rank works on the first
    one of the data, which does not count."""
    if batch.sample_count:
        return Share(batch.data, batch.sample_count, total)
    order = EpochOrder(len(source), 1, 0, 1, 0, 0, shuffle=False)
    spare = source.fetch_batch(order, 0, device)
    return Share(spare.data, 0, total)
