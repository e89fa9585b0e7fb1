"""From gradients to the next weights: the same order of calls for every kind of replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from echelon.experiment.definition import Experiment
from echelon.experiment.schedule_length import waits_for_metric


def update_weights(
    experiment: Experiment,
    clip_gradients: Callable[[], None] | None,
    step_optimizer: Callable[[], None],
) -> None:
    """Unscales, clips, steps the optimizer, updates the scaler, steps the experiment's schedule.

    Gradients are the same on all ranks by then, so all ranks skip an overflow or none does.
    1. Unscale first: a norm to clip by means nothing for scaled gradients.
    2. The scaler makes the optimizer step itself, because it skips the step on an overflow.
    3. The schedule comes last, as torch requires it after the optimizer. One that waits for an
       evaluation is stepped there.
    """
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
    if experiment.schedule is not None and not waits_for_metric(experiment.schedule):
        experiment.schedule.step()


def list_trained_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that the optimizer trains, which are the ones to clip.

    Gradients of other parameters are never used, and a scaler does not unscale them.
    """
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


class UnprofiledStep:
    """Steps an optimizer without torch's profiler label around it, which takes a tenth of a small
    step.

    torch's own `step` is used where a profiler runs, where hooks are registered, or where the class
    does not have torch's wrapper.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        # Only where torch wrapped the class's step and the instance has none of its own.
        is_wrapped = getattr(step, "hooked", False) and "step" not in vars(optimizer)
        self._unwrapped_step: Callable[[Optimizer], Any] | None = (
            getattr(step, "__wrapped__", None) if is_wrapped else None
        )

    def __call__(self) -> None:
        if self._unwrapped_step is None or self._is_observed():
            self._optimizer.step()
        else:
            self._unwrapped_step(self._optimizer)

    def _is_observed(self) -> bool:
        """Return whether hooks or a profiler need torch's own `step`."""
        own = self._optimizer
        hooks = own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks
        for_all = (
            optimizer_hooks._global_optimizer_pre_hooks
            or optimizer_hooks._global_optimizer_post_hooks
        )
        return bool(hooks or for_all or torch.autograd._profiler_enabled())
