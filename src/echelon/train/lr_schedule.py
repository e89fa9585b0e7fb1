"""The learning rate as a function of the step, so there is nothing to save and nothing to
restore."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from echelon.config.schema import TrainerConfig
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment


class LRSchedule:
    """Scales the learning rates that the experiment gave its optimizer, by `trainer.schedule`.

    Where the experiment has a schedule of its own, that one sets the rates and this one only reads
    them.
    """

    def __init__(self, trainer: TrainerConfig, total_steps: int, experiment: Experiment) -> None:
        self.kind = trainer.schedule
        self.warmup_steps = trainer.warmup_steps
        self.total_steps = total_steps
        self.optimizer = experiment.optimizer
        self.has_own_schedule = experiment.schedule is not None
        self._applied_factor: float | None = None
        self.base_rates = [float(group["lr"]) for group in self.param_groups]
        if self.has_own_schedule and (self.kind != "constant" or self.warmup_steps > 0):
            raise EchelonError(
                Fault(
                    f"trainer.schedule={self.kind} trainer.warmup_steps={self.warmup_steps} are "
                    "set, but the experiment has a schedule of its own",
                    "leave one of the two out",
                )
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups. Read each time, because loading a state dict replaces
        them."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def compute_factor(self, step: int) -> float:
        """Return the factor for the update from `step` to `step + 1`: warm-up first, then the
        schedule."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.kind == "linear":
            return max(0.0, 1.0 - done)
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0

    def set_rates(self, step: int) -> None:
        """Sets the learning rates for the next update; does nothing where they have not changed."""
        if self.has_own_schedule:
            return
        factor = self.compute_factor(step)
        if factor == self._applied_factor:
            return
        self._applied_factor = factor
        for group, peak in zip(self.param_groups, self.base_rates, strict=True):
            if isinstance(group["lr"], Tensor):  # where a CUDA graph reads it
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    @property
    def current_rate(self) -> float:
        """The learning rate of the first group at the last step."""
        if self.has_own_schedule or self._applied_factor is None:
            return float(self.param_groups[0]["lr"])
        return self.base_rates[0] * self._applied_factor
