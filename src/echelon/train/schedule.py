"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from echelon.config.schema import Trainer
from echelon.errors import EchelonError, Fault
from echelon.train.experiment import Experiment


class Schedule:
    """Scales the rates the experiment gave to its optimizer, or leaves them to its own schedule."""

    def __init__(self, trainer: Trainer, total_steps: int, experiment: Experiment) -> None:
        self.kind = trainer.schedule
        self.warmup = trainer.warmup_steps
        self.total = total_steps
        self.optimizer = experiment.optimizer
        self.own = experiment.schedule is not None
        self._applied: float | None = None
        self.peaks = [float(group["lr"]) for group in self.groups]
        if self.own and (self.kind != "constant" or self.warmup > 0):
            raise EchelonError(
                Fault(
                    f"trainer.schedule={self.kind} trainer.warmup_steps={self.warmup} are set, but "
                    "the experiment has a schedule of its own",
                    "leave one of the two out",
                )
            )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Asked each time: an optimizer that loads its state makes new ones."""
        return self.optimizer.param_groups

    def factor(self, step: int) -> float:
        """For the update that makes `step` steps into `step + 1`."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        if self.kind == "linear":
            return max(0.0, 1.0 - done)
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0

    def apply(self, step: int) -> None:
        if self.own:
            return
        factor = self.factor(step)
        if factor == self._applied:
            return
        self._applied = factor
        for group, peak in zip(self.groups, self.peaks, strict=True):
            if isinstance(group["lr"], Tensor):  # where a CUDA graph reads it
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    @property
    def rate(self) -> float:
        """Of the first group, at the last step."""
        if self.own or self._applied is None:
            return float(self.groups[0]["lr"])
        return self.peaks[0] * self._applied
