"""From gradients to the next weights, whatever a replica is made of."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from echelon.train.experiment import Experiment


def update(
    experiment: Experiment, clip: Callable[[], None] | None, optimize: Callable[[], None]
) -> None:
    """The same on all ranks, whose gradients are the same: all skip an overflow or none."""
    optimizer, scaler = experiment.optimizer, experiment.scaler
    if scaler is not None:
        scaler.unscale_(optimizer)
    if clip is not None:
        clip()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimize()
    if experiment.schedule is not None:
        experiment.schedule.step()


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """What is clipped: gradients of others are never used, and a scaler leaves them as they are."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
