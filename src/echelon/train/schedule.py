"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

import torch

from echelon.config.schema import Trainer


class Schedule:
    """Scales the rates the experiment gave to its optimizer."""

    def __init__(
        self, trainer: Trainer, total_steps: int, optimizer: torch.optim.Optimizer
    ) -> None:
        self.kind = trainer.schedule
        self.warmup = trainer.warmup_steps
        self.total = total_steps
        self.groups = optimizer.param_groups
        self.peaks = [float(group["lr"]) for group in self.groups]
        self.active = self.kind != "constant" or self.warmup > 0

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
        factor = self.factor(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * factor
