"""Trainings whose loss or weights stop being finite, each for a reason of its own.

`ECHELON_TEST_REPAIRED=1`: the data has no NaN any more.
`ECHELON_TEST_SPOILED_SHARD="RANK:STEP"`: after this step, the shards of this rank are NaN.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import layer_stack
import torch
import toy_experiments
from torch import Tensor, nn

import echelon

BAD_SAMPLE = 13
"""Of 20: where the samples are to blame, this one is."""


@dataclass
class Settings:
    why: str = "sample"
    """sample: a NaN in the data. layer: a layer makes infinity of a finite sample. loss: the loss
    does. gradient: the loss stays finite, its gradient does not. rate: nothing but the rate.
    buffer: a running average. optimizer: its state. mask: nothing is wrong, infinities are meant.
    """
    lr: float = 0.01
    eval_samples: int = 0


class Exponent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x / 1000).exp() if bool((x > 1e6).any()) else x


class Model(nn.Module):
    mask: Tensor
    running_mean: Tensor

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
        self.first = nn.Linear(3, 4)
        self.exponent = Exponent()
        self.head = nn.Linear(4, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("running_mean", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.why == "buffer" and self.calls == 7:
            self.running_mean += torch.inf
        if self.why == "mask":
            self.mask[1] = -torch.inf
        return self.head(self.exponent(self.first(x))).squeeze(-1)  # type: ignore[no-any-return]


class Forgetful(torch.optim.SGD):
    """Loses its memory in the seventh step; the weights are still as they should be."""

    steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        if self.steps == 7:
            for state in self.state.values():
                state["momentum_buffer"].fill_(torch.nan)


def diverging(cfg: Settings) -> echelon.Experiment:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator)
    y = x.sum(1)
    if cfg.why == "sample" and "ECHELON_TEST_REPAIRED" not in os.environ:
        x[BAD_SAMPLE, 1] = torch.nan
    elif cfg.why == "layer":
        x[BAD_SAMPLE] = 1e9
    elif cfg.why in ("loss", "gradient"):
        y[BAD_SAMPLE] = 777.0
    model = Model(cfg.why)
    kind = Forgetful if cfg.why == "optimizer" else torch.optim.SGD
    rate = 1e6 if cfg.why == "rate" else cfg.lr

    def loss(output: Tensor, target: Tensor) -> Tensor:
        marked = (target == 777.0).any()
        error = ((output - target.clamp(max=10.0)) ** 2).mean()
        if marked and cfg.why == "loss":
            return error + (output * 0).sum().log()
        if marked and cfg.why == "gradient":
            return error + (output.sum() * 0).sqrt()
        return error

    return echelon.Experiment(
        model=model,
        optimizer=kind(model.parameters(), lr=rate, momentum=0.9),
        loss=loss,
        train_data=(x, y),
        eval_data=(x[: cfg.eval_samples], y[: cfg.eval_samples]) if cfg.eval_samples else None,
    )


def sharded(cfg: layer_stack.Settings) -> echelon.Experiment:
    """The stack of layers, whose shards on one rank are spoiled."""
    experiment = layer_stack.stack(cfg)
    rank, step = map(int, os.environ.get("ECHELON_TEST_SPOILED_SHARD", "-1:0").split(":"))
    seen = [0]

    def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen[0] += 1
        if seen[0] == step and rank == toy_experiments.own_rank():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.detach().to_local().fill_(torch.nan)

    experiment.optimizer.register_step_post_hook(spoil)
    return experiment
