"""Experiments for test_cuda_capture.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon import Experiment, optim


@dataclass
class Settings:
    samples: int = 2000
    optimizer: str = "SGD"
    dropout: float = 0.0
    norm: bool = False
    host_random: bool = False
    counter: bool = False
    reads: bool = False
    dataset: bool = False
    own_schedule: bool = False


class Net(nn.Module):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.calls = 0
        self.first = nn.Linear(20, 64)
        self.norm = nn.BatchNorm1d(64) if cfg.norm else nn.Identity()
        self.drop = nn.Dropout(cfg.dropout)
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.cfg.counter
        if self.cfg.host_random:
            x = x * (1.0 + 0.01 * random.random())
        y = self.last(self.drop(self.norm(torch.relu(self.first(x)))))
        if self.cfg.reads and float(y.sum()) > 1e9:
            return y * 0.0  # type: ignore[no-any-return]
        return y  # type: ignore[no-any-return]


def experiment(cfg: Settings) -> Experiment:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(cfg.samples, 20, generator=generator)
    y = x[:, :1].tanh() + x[:, 1:2]
    model = Net(cfg)
    optimizer = getattr(torch.optim, cfg.optimizer)(model.parameters(), lr=0.01)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 10) if cfg.own_schedule else None
    data: Any = torch.utils.data.TensorDataset(x, y) if cfg.dataset else (x, y)
    return Experiment(model, optimizer, nn.functional.mse_loss, data, schedule=step)


def mixed(cfg: Settings) -> Experiment:
    """Every sample is mixed with another one on the device, with random numbers of both kinds."""
    made = experiment(cfg)

    def mix(batch: Any) -> Any:
        x, y = batch
        share = torch.rand(len(x), 1, device=x.device) * random.random()
        return x + share * x.flip(0), y + share * y.flip(0)

    made.batch_transform = mix
    return made


class Dots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(300, 16, sparse=True)
        self.items = nn.Embedding(200, 16, sparse=True)
        self.tower = nn.Linear(32, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        a, b = self.users(users), self.items(items)
        return self.tower(torch.cat([a, b], 1)).squeeze(1) + (a * b).sum(1)  # type: ignore[no-any-return]


def tables(cfg: Settings) -> Experiment:
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(0, 300, (cfg.samples,), generator=generator)
    items = torch.randint(0, 200, (cfg.samples,), generator=generator)
    stars = torch.sin(users * 0.1) + torch.cos(items * 0.2)
    model = Dots()
    optimizer = getattr(optim, cfg.optimizer)(model.parameters(), lr=0.01)
    return Experiment(model, optimizer, nn.functional.mse_loss, (users, items, stars))


class ThawingNet(Net):
    """Its first layer is frozen until it is evaluated after a step, so between two steps."""

    def __init__(self, cfg: Settings) -> None:
        super().__init__(cfg)
        self.first.requires_grad_(False)
        self.untrained = self.last.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not torch.equal(self.last.weight.detach().cpu(), self.untrained):
            self.first.requires_grad_(True)
        return super().forward(x)


def thawing(cfg: Settings) -> Experiment:
    parts = experiment(cfg)
    model = ThawingNet(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    columns = tuple(t[:64] for t in parts.train_data)
    return Experiment(model, optimizer, nn.functional.mse_loss, parts.train_data, eval_data=columns)


def classes(cfg: Settings) -> Experiment:
    """Samples that are ignored: the loss is a mean over the others."""
    parts = experiment(cfg)
    x, y = parts.train_data
    target = (y.squeeze(1) > 0).long()
    target[::3] = -100
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Experiment(model, optimizer, nn.functional.cross_entropy, (x, target))


def annealed(cfg: Settings) -> Experiment:
    """A loss whose weight an evaluation lowers."""
    parts = experiment(cfg)
    weights = {"loss": 1.0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return weights["loss"] * nn.functional.mse_loss(outputs, targets)

    def evaluate(model: nn.Module, batches: Any) -> dict[str, tuple[float, int]]:
        weights["loss"] *= 0.5
        return {"error": (weights["loss"], 1)}

    columns = tuple(t[:64] for t in parts.train_data)
    return Experiment(
        parts.model, parts.optimizer, loss, parts.train_data, eval_data=columns, evaluate=evaluate
    )
