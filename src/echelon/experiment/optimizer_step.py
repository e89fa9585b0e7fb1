"""From gradients to the next weights, whatever a replica is made of."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from echelon.experiment.definition import Experiment


def update_weights(
    experiment: Experiment,
    clip_gradients: Callable[[], None] | None,
    step_optimizer: Callable[[], None],
) -> None:
    """The same on all ranks, whose gradients are the same: all skip an overflow or none."""
    optimizer, scaler = experiment.optimizer, experiment.scaler
    if scaler is not None:
        scaler.unscale_(optimizer)
    if clip_gradients is not None:
        clip_gradients()
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        step_optimizer()
    if experiment.schedule is not None:
        experiment.schedule.step()


def list_trained_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """What is clipped: gradients of others are never used, and a scaler leaves them as they are."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
