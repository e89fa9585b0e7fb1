"""What the two kinds of replicas share: requests and results of a step, microbatches, readback.

A replica is one copy of the model with its training step. `DDPReplica` holds the model whole in
every process, `FSDPReplica` holds a shard of it in each of several.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.data.batch_structure import cut_batch
from echelon.experiment.loss_counts import Count

READBACK_STEPS = {"cpu": 1, "cuda": 16}
"""Steps between two readbacks. Reading makes the host wait for the device, and all ranks must read
after the same step."""


class StepRequests(NamedTuple):
    """What a rank asks for after this step, by its own signals and its own clock."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    read_each_step: bool = False
    """To read results back after every step, because steps are slow."""
    regroup: bool = False
    """To go over to another round, in which a replaced rank takes part again."""
    copy: bool = False
    """To copy the state into the memory of every rank."""


class StepResult(NamedTuple):
    """What all ranks know about one step."""

    requests: StepRequests
    loss: float
    """Mean over the global batch."""


def compute_part_weight(
    count: Count | None, sample_count: int, world_size: int, total: int
) -> float:
    """Return the weight of the loss of one part of a global batch of `total` samples.

    Gradients are averaged over ranks, whose shares may differ in size. The weight turns that into
    the mean over all samples, or the sum. Where the loss counts something else, it is multiplied by
    that count, and divided by the count of all parts when it is known.
    """
    if not sample_count:
        return 0.0
    if count == "sum":
        return float(world_size)
    return (1 if callable(count) else sample_count) * world_size / total


def split_microbatches(
    data: Any, sample_count: int, count: int, is_default_collated: bool = True
) -> list[tuple[Any, int]]:
    """Splits this rank's share into `count` microbatches with their sizes.

    Ranks must agree on the number, so some microbatches may be empty: their data is None. A batch
    that has no rows to cut is refused, also one whose lists can be read in two ways, which those of
    torch's default_collate cannot.
    """
    if count == 1 or data is None:
        return [(data, sample_count)] + [(None, 0)] * (count - 1)
    pieces: list[tuple[Any, int]] = []
    start = 0
    for i in range(count):
        size = sample_count // count + (i < sample_count % count)
        stop = start + size
        piece = cut_batch(data, sample_count, start, stop, is_default_collated) if size else None
        pieces.append((piece, size))
        start = stop
    return pieces


def read_tensors_to_host(pending: list[Tensor]) -> list[Any]:
    """Reads tensors back from the device as Python numbers, in one transfer."""
    if len(pending) == 1:
        return [pending[0].tolist()]
    return torch.stack(pending).tolist() if pending else []
