"""What the campaign of random configurations trains. Nothing here depends on how ranks share a
batch: no dropout, and buffers that follow the weights and not the samples."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from toy_experiments import Life

import echelon

FEATURES = 5
USERS, ITEMS = 13, 6


@dataclass
class RandomSettings:
    kind: str = "dense"
    """``dense``, ``buffers`` (layers with buffers that change in training) or ``tables``."""
    samples: int = 17
    eval_samples: int = 0
    width: int = 8
    depth: int = 2
    activation: str = "Tanh"
    has_norms: bool = False
    optimizer: str = "sgd"
    lr: float = 0.02
    weight_decay: float = 0.0
    gamma: float = 0.0
    """By which the experiment's own schedule lowers the rate every third step; 0: it has none."""


class ScaledLinear(nn.Linear):
    """A layer with buffers: one that never changes, and one that training sets from the weights."""

    shift: Tensor
    size: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("shift", torch.full((outputs,), 0.1))
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.size.copy_(self.weight.detach().float().abs().mean() + 0.5)
        return super().forward(x) / self.size + self.shift


class Recommender(nn.Module):
    """Sparse tables, one of them looked up twice a sample, below dense layers."""

    def __init__(self, cfg: RandomSettings) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, cfg.width, sparse=True)
        self.items = nn.Embedding(ITEMS, cfg.width, sparse=True)
        self.tower = _stack(cfg, cfg.width)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        both = self.users(user) * self.items(item) + self.items((item + 1) % ITEMS)
        return self.tower(both)  # type: ignore[no-any-return]


def random_experiment(cfg: RandomSettings) -> echelon.Experiment:
    model = Recommender(cfg) if cfg.kind == "tables" else _stack(cfg, FEATURES)
    optimizer = _make_optimizer(cfg, model)
    Life(optimizer)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 3, cfg.gamma) if cfg.gamma else None
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=_make_data(cfg, cfg.samples, seed=1),
        eval_data=_make_data(cfg, cfg.eval_samples, seed=2) if cfg.eval_samples else None,
        schedule=steps,
    )


def _stack(cfg: RandomSettings, inputs: int) -> nn.Sequential:
    linear = ScaledLinear if cfg.kind == "buffers" else nn.Linear
    layers: list[nn.Module] = []
    for _ in range(cfg.depth):
        layers += [linear(inputs, cfg.width), getattr(nn, cfg.activation)()]
        layers += [nn.LayerNorm(cfg.width)] * cfg.has_norms
        inputs = cfg.width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


def _make_optimizer(cfg: RandomSettings, model: nn.Module) -> torch.optim.Optimizer:
    make: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "row_sgd": echelon.optim.RowSGD,
        "row_adam": echelon.optim.RowAdam,
    }
    more = {"weight_decay": cfg.weight_decay} if cfg.weight_decay else {}
    made: torch.optim.Optimizer = make[cfg.optimizer](model.parameters(), lr=cfg.lr, **more)
    return made


def _make_data(cfg: RandomSettings, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets. The noise keeps the loss away from zero."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, 1, generator=generator)
    if cfg.kind == "tables":
        limits = torch.tensor([USERS, ITEMS])
        pairs = torch.randint(0, 1 << 30, (size, 2), generator=generator) % limits
        return pairs, noise + 1.0
    x = torch.randn(size, FEATURES, generator=generator)
    return x, x.sum(1, keepdim=True) + noise


def kill_while_saving(rank: int, victim: int, operation: int) -> None:
    """Make one rank kill itself at so many operations on the file system of its snapshots' writer,
    which is a thread of its own."""
    from snapshot_kills import kill_at_operation

    if rank == victim:
        main = threading.main_thread()
        kill_at_operation(operation, is_counted=lambda: threading.current_thread() is not main)
