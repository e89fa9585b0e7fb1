"""A model whose body is frozen at first: the experiment thaws it, and freezes its head, in the
midst of the training. A pretrained model is tuned so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toy_experiments import FEATURES, Life

import echelon


@dataclass
class ThawingSettings:
    samples: int = 17
    where: str = "forward"
    """What freezes and thaws: the model's `forward`, or a `schedule` between two steps."""
    thaw_step: int = 3
    freeze_step: int = 1000
    optimizer: str = "momentum"


class ThawingModel(nn.Module):
    def __init__(self, cfg: ThawingSettings) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.body.requires_grad_(False)
        self.steps = 0
        self.cfg = cfg

    def change_parameters(self) -> None:
        if self.steps >= self.cfg.thaw_step:
            self.body.requires_grad_(True)
        if self.steps >= self.cfg.freeze_step:
            self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cfg.where == "forward":
            self.change_parameters()
        return self.head(self.body(x)).squeeze(-1)  # type: ignore[no-any-return]


def thawing(cfg: ThawingSettings) -> echelon.Experiment:
    model = ThawingModel(cfg)
    optimizer = make_thawing_optimizer(cfg, model)
    Life(optimizer)

    def count_step(*_: Any) -> None:
        model.steps += 1

    optimizer.register_step_post_hook(count_step)

    def set_rate(step: int) -> float:
        if cfg.where == "schedule":
            model.steps = step
            model.change_parameters()
        return 1.0

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=make_thawing_data(cfg.samples),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, set_rate),
    )


def make_thawing_optimizer(cfg: ThawingSettings, model: nn.Module) -> torch.optim.Optimizer:
    if cfg.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def make_thawing_data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x.sum(1) + torch.randn(samples, generator=generator)


class ThawingTable(nn.Module):
    """A table of rows with sparse gradients, which is thawed in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 1, sparse=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.table.requires_grad_(False)
        self.steps = 0

    def forward(self, row: Tensor) -> Tensor:
        if self.steps >= 2:
            self.table.requires_grad_(True)
        return self.table(row).squeeze(-1) * self.scale  # type: ignore[no-any-return]


def thawing_tables(cfg: ThawingSettings) -> echelon.Experiment:
    model = ThawingTable()
    optimizer = echelon.optim.RowSGD(model.parameters(), lr=0.1)

    def count_step(*_: Any) -> None:
        model.steps += 1

    optimizer.register_step_post_hook(count_step)
    rows = torch.arange(cfg.samples) % 5
    return echelon.Experiment(model, optimizer, nn.functional.mse_loss, (rows, rows.float()))
