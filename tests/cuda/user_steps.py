"""Experiments with steps of their own for test_cuda_user_step_capture.py."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import echelon


@dataclass
class Settings:
    samples: int = 2000
    dropout: float = 0.0
    norm: bool = False
    scheduled: bool = False
    optimizer: str = "Adam"
    counts: bool = False
    """Whether the step counts its calls."""
    asks: bool = False
    """Whether the step asks the session something."""
    transforms: bool = False
    """Whether batches are transformed; there the process can be killed, as a captured step runs no
    code of its own (ECHELON_TEST_KILL_AT, a number of batches)."""


class Scaled(torch.optim.Optimizer):
    """An optimizer of the user's own: sign descent with momentum, all in tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * momentum.sign())


class ReadingScaled(Scaled):
    """The same, but it makes the host read the learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-float(group["lr"]))


def make_columns(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 20, generator=generator)
    return x, x[:, :1].tanh() + x[:, 1:2]


def make_optimizer(cfg: Settings, model: nn.Module) -> torch.optim.Optimizer:
    own = {"Scaled": Scaled, "ReadingScaled": ReadingScaled}
    lr = 0.001 if cfg.optimizer in own else 0.01
    made: torch.optim.Optimizer = (own.get(cfg.optimizer) or getattr(torch.optim, cfg.optimizer))(
        model.parameters(), lr=lr
    )
    return made


def adversaries(cfg: Settings) -> echelon.Experiment:
    """Two models and two optimizers in turn, with noise and a term of each logged."""
    norm = nn.BatchNorm1d(32) if cfg.norm else nn.Identity()
    maker = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 20))
    judge = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(cfg.dropout), nn.Linear(32, 1))
    makes, judges = make_optimizer(cfg, maker), make_optimizer(cfg, judge)
    score = nn.functional.binary_cross_entropy_with_logits
    counter = {"calls": 0}

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        x, _ = batch
        if cfg.counts:
            counter["calls"] += 1
        if cfg.asks and session.every(steps=2):
            x = x * 2
        fake = maker(torch.randn(len(x), 8, device=x.device))
        real_scores, fake_scores = judge(x), judge(fake.detach())
        loss_d = score(real_scores, torch.ones_like(real_scores))
        loss_d = loss_d + score(fake_scores, torch.zeros_like(fake_scores))
        session.backward(loss_d)
        session.step(judges, clip=1.0)
        scores = judge(fake)
        loss_g = score(scores, torch.ones_like(scores))
        session.backward(loss_g)
        session.step(makes)
        return {"loss": loss_g, "loss_d": loss_d, "norm": session.grad_norm, "one": 1}

    schedules = {
        "maker": torch.optim.lr_scheduler.CosineAnnealingLR(makes, 200),
        "judge": torch.optim.lr_scheduler.ExponentialLR(judges, 0.99),
    }
    calls = itertools.count(1)

    def transform(batch: Any) -> Any:
        if next(calls) == int(os.environ.get("ECHELON_TEST_KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    return echelon.Experiment(
        model={"maker": maker, "judge": judge},
        optimizer={"maker": makes, "judge": judges},
        schedule=schedules if cfg.scheduled else None,
        step=step,
        train_data=make_columns(cfg.samples),
        batch_transform=transform if cfg.transforms else None,
    )


def counted(cfg: Settings) -> echelon.Experiment:
    """A loss over some of the samples, whose number is known on the device alone."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        x, y = batch
        counts = (x[:, :1] > 0).float()
        loss = ((model(x) - y).square() * counts).sum() / counts.sum()
        session.backward(loss, count=counts.sum())
        session.step(optimizer)
        return {"loss": loss}

    def evaluate(model: nn.Module, batches: Any) -> dict[str, tuple[float, int]]:
        total, count = 0.0, 0
        for x, y in batches:
            total += float((model(x) - y).square().sum())
            count += len(x)
        return {"error": (total, count)}

    x, y = make_columns(cfg.samples)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        step=step,
        train_data=(x, y),
        eval_data=(x[:64], y[:64]),
        evaluate=evaluate,
    )


def annealed(cfg: Settings) -> echelon.Experiment:
    """A step whose weight an evaluation lowers."""
    first = nn.Linear(20, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    weights = {"size": 1.0}

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        x, y = batch
        loss = (model(x) - y).square().mean() + weights["size"] * first.weight.square().mean()
        session.backward(loss)
        session.step(optimizer)
        return {"loss": loss}

    def evaluate(model: nn.Module, batches: Any) -> dict[str, tuple[float, int]]:
        weights["size"] *= 0.5
        return {"error": (weights["size"], 1)}

    x, y = make_columns(cfg.samples)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        step=step,
        train_data=(x, y),
        eval_data=(x[:64], y[:64]),
        evaluate=evaluate,
    )
