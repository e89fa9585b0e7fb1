"""Loops and steps of one's own that fail as their settings say, see `faulty_experiment.py`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faulty_experiment import Model, Settings, Trap
from torch import Tensor, nn
from torch.utils.data import Dataset

import echelon
from echelon.data.toy import make_linear_data

X, Y = make_linear_data(96, 8, 0.1, 0)


@dataclass
class LoopSettings(Settings):
    caught: str = ""
    """What the loop catches around each of its iterations: ``Exception`` or ``everything``."""
    dropout: float = 0.0
    slow_on: int = -1
    """A rank whose steps take longer than those of all others, of `layers`."""
    slow_host: str = ""
    """A machine of which this is so."""


class NoisySamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are drawn anew in every epoch."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(8), Y[index]


class Counter:
    """A part with a state of its own."""

    def __init__(self) -> None:
        self.steps, self.norms = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.norms = state["steps"], state["norms"]


def is_own_rank(cfg: LoopSettings) -> bool:
    return int(os.environ["RANK"]) == cfg.on


class Parts:
    """Two models with an optimizer each, and a counter."""

    def __init__(self, cfg: LoopSettings) -> None:
        self.trap = Trap(cfg)
        self.trap.reach("build")
        if cfg.unbuildable and Path(cfg.unbuildable).exists() and is_own_rank(cfg):
            raise ValueError("there is nothing to build it of")
        self.first, self.second = Model(8, max(4, cfg.rows)), nn.Linear(1, 1)
        self.first.trap = self.trap
        self.sgd = torch.optim.SGD(self.first.parameters(), lr=0.05)
        self.adam = torch.optim.Adam(self.second.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.99)
        self.dropout = nn.Dropout(cfg.dropout)
        self.counter = Counter()

    def prepare(self, session: echelon.Session) -> None:
        session.prepare(self.first, self.second, self.sgd, self.adam, self.schedule)
        session.register(counter=self.counter)

    def train(self, x: Tensor, y: Tensor, session: echelon.Session) -> Tensor:
        loss = nn.functional.mse_loss(self.second(self.dropout(self.first(x))), y)
        session.backward(loss)
        self.counter.steps += 1
        self.counter.norms[0] += self.second.weight.grad.norm()  # type: ignore[union-attr]
        session.step(self.sgd)
        session.step(self.adam)
        return loss.detach()


def loop(cfg: LoopSettings, session: echelon.Session) -> None:
    parts = Parts(cfg)
    parts.prepare(session)
    for x, y in session.batches(NoisySamples()):
        if not cfg.caught:
            _iterate(parts, x, y, session)
            continue
        try:
            _iterate(parts, x, y, session)
        except BaseException as error:
            if cfg.caught != "everything" and not isinstance(error, Exception):
                raise
            time.sleep(0.1)


def _iterate(parts: Parts, x: Tensor, y: Tensor, session: echelon.Session) -> None:
    loss = parts.train(x, y, session)
    steps, norms = parts.counter.steps, parts.counter.norms[0]
    session.log(loss=loss, counted=steps, norms=norms)
    if session.every(steps=10):
        parts.schedule.step()
        session.best(error=_evaluate(parts, session), higher_is_better=False)


def _evaluate(parts: Parts, session: echelon.Session) -> Tensor:
    parts.first.eval()
    errors = [
        session.gather((parts.second(parts.first(x)) - y).abs())
        for x, y in session.eval_batches((X[80:], Y[80:]), batch_size=6)
    ]
    parts.first.train()
    return torch.cat(errors).detach().mean()


def steps(cfg: LoopSettings, session: echelon.Session) -> None:
    """Without data: every process has its part of the same rows."""
    parts = Parts(cfg)
    parts.prepare(session)
    for number in session.steps():
        rows = range(8 * (number % 10), 8 * (number % 10) + 8)
        own = list(session.split(rows))
        loss = nn.functional.mse_loss(parts.second(parts.first(X[own])), Y[own])
        session.backward(loss, count=len(own))
        parts.counter.steps += 1
        session.step(parts.sgd)
        session.step(parts.adam)
        session.log(loss=loss, counted=parts.counter.steps)


def experiment(cfg: LoopSettings) -> echelon.Experiment:
    """The same as an experiment with a step of its own, which Echelon evaluates."""
    parts = Parts(cfg)

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        x, y = batch
        return {"loss": parts.train(x, y, session), "counted": parts.counter.steps}

    def evaluate(model: nn.Module, batches: Iterator[Any]) -> dict[str, Any]:
        error, samples = 0.0, 0
        for x, y in batches:
            error += float((parts.second(parts.first(x)) - y).detach().abs().sum())
            samples += len(x)
        return {"loss": (error, samples)}

    return echelon.Experiment(
        model={"first": parts.first, "second": parts.second},
        optimizer={"sgd": parts.sgd, "adam": parts.adam},
        schedule={"sgd": parts.schedule},
        step=step,
        evaluate=evaluate,
        train_data=NoisySamples(),
        eval_data=(X[80:], Y[80:]),
        state={"counter": parts.counter},
    )


class Layers(nn.Sequential):
    """A model that ranks can hold together, layer by layer."""

    trap: Trap

    def __init__(self, cfg: LoopSettings) -> None:
        width = max(8, cfg.rows)
        layers = [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(2))]
        super().__init__(*layers, nn.Linear(width, 1))
        self.trap = Trap(cfg)
        is_slow_host = socket.gethostname() == cfg.slow_host
        self.is_slow = is_slow_host or int(os.environ["RANK"]) == cfg.slow_on

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.trap.steps += 1
            self.trap.reach("step")
            self.trap.pause()
            time.sleep(0.3 * self.is_slow)
        else:
            self.trap.reach("evaluation")
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trap.reach("save")
        return super().state_dict(*args, **kwargs)


def layers(cfg: LoopSettings) -> echelon.Experiment:
    """An experiment with a loss, for replica.kind=fsdp and replica.checkpoint."""
    if cfg.unbuildable and Path(cfg.unbuildable).exists() and is_own_rank(cfg):
        raise ValueError("there is nothing to build it of")
    model = Layers(cfg)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        train_data=NoisySamples(),
        eval_data=(X[80:], Y[80:]),
    )


class NumberedShard:
    """Samples without end, with a state."""

    def __init__(self, shard: int, shards: int) -> None:
        self.number = shard
        self.shards = shards

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            index = self.number % 80
            self.number += self.shards
            yield X[index], Y[index]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def streamed_layers(cfg: LoopSettings) -> echelon.Experiment:
    """An experiment with a loss over a stream."""
    experiment = layers(cfg)
    experiment.train_data = echelon.data.stream(NumberedShard, shards=4)
    return experiment


def streamed_loop(cfg: LoopSettings, session: echelon.Session) -> None:
    """A loop over a stream."""
    parts = Parts(cfg)
    parts.prepare(session)
    for x, y in session.batches(echelon.data.stream(NumberedShard, shards=4)):
        loss = parts.train(x, y, session)
        session.log(loss=loss, counted=parts.counter.steps)
