"""What the tests train, and the faults they suffer, given as data.

`ECHELON_TEST_FAULT="RANK:STEP:WHAT"`: after this rank's STEP-th optimizer step, WHAT happens
to it: a signal (KILL, TERM, USR2, INT), `wait` (until it is ended from outside), `hear` (it waits
until it is asked to stop) or `go` (nothing; it has waited for ECHELON_TEST_AFTER).
`ECHELON_TEST_AFTER=PATH`: it does not happen before this is there.
`ECHELON_TEST_TRACE=FOLDER`: every rank writes down what it did: samples asked for, batches, steps.

Faults are variables and not settings, because a run goes on only with the settings it had.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import echelon


@dataclass
class Settings:
    samples: int = 17
    eval_samples: int = 0
    hidden: int = 8
    dropout: float = 0.0
    optimizer: str = "momentum"
    lr: float = 0.02
    dataset: bool = False
    schedule: str = ""
    metrics: bool = False
    scale: float = 0.0
    """What a scaler of the loss begins with; 0: none."""


FEATURES = 5


def regression(cfg: Settings) -> echelon.Experiment:
    model = nn.Sequential(
        nn.Linear(FEATURES, cfg.hidden),
        nn.Tanh(),
        nn.Dropout(cfg.dropout),
        nn.Linear(cfg.hidden, 1),
    )
    optimizer = _optimizer(cfg, model)
    life = Life(optimizer)
    train = _data(cfg.samples, seed=1)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=Samples(train) if cfg.dataset else train,
        eval_data=_data(cfg.eval_samples, seed=2) if cfg.eval_samples else None,
        metrics=_metrics if cfg.metrics else None,
        schedule=_schedule(cfg, optimizer),
        scaler=torch.amp.GradScaler("cpu", cfg.scale, growth_interval=4) if cfg.scale else None,
        predict=life.predict,
    )


def another(cfg: Settings) -> echelon.Experiment:
    """The same under another name."""
    return regression(cfg)


@dataclass
class TableSettings:
    samples: int = 17
    users: int = 11
    items: int = 5
    tower: bool = True
    optimizer: str = "rows"
    lr: float = 0.05
    scale: float = 0.0
    misused: bool = False
    """The whole table is used, not its rows alone."""
    max_norm: float = 0.0
    """To which a row of users is shortened when it is looked up; 0: none."""


class Tables(nn.Module):
    """A recommender: sparse tables, one of them of single numbers, and one used twice a sample."""

    def __init__(self, cfg: TableSettings) -> None:
        super().__init__()
        self.users = nn.Embedding(cfg.users, 6, sparse=True, max_norm=cfg.max_norm or None)
        self.items = nn.Embedding(cfg.items, 6, sparse=True)
        self.bias = nn.Embedding(cfg.users, 1, sparse=True)
        self.unused = nn.Embedding(3, 2, sparse=True)
        self.tower = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        self.tower.requires_grad_(cfg.tower)
        self.misused = cfg.misused

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        both = self.users(user) * self.items(item) + self.items((item + 1) % 5)
        found = self.tower(both) + self.bias(user)
        if self.misused:
            found = found + self.users.weight.mean()
        return found.squeeze(1)  # type: ignore[no-any-return]


def tables(cfg: TableSettings) -> echelon.Experiment:
    model = Tables(cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=cfg.lr)
    if cfg.optimizer == "row_sgd":
        optimizer = echelon.optim.RowSGD(trained, lr=cfg.lr)
    if cfg.optimizer == "rows":
        optimizer = echelon.optim.RowAdam(trained, lr=cfg.lr, weight_decay=0.01)
    life = Life(optimizer)
    generator = torch.Generator().manual_seed(3)
    sizes = (cfg.samples,)
    ratings = torch.randn(sizes, generator=generator) + 1.0
    users, items = (
        torch.randint(0, most, sizes, generator=generator, dtype=torch.int32)
        for most in (cfg.users, cfg.items)
    )
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=(torch.arange(cfg.samples), users, items, ratings),
        scaler=torch.amp.GradScaler("cpu", cfg.scale, growth_interval=4) if cfg.scale else None,
        predict=life.predict_rating,
    )


def _optimizer(cfg: Settings, model: nn.Module) -> torch.optim.Optimizer:
    if cfg.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=cfg.lr)
    momentum = 0.5 if cfg.optimizer == "less momentum" else 0.9
    return torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=momentum)


def _schedule(cfg: Settings, optimizer: torch.optim.Optimizer) -> Any:
    if cfg.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    if cfg.schedule == "cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg.lr, total_steps=50)
    return None


def _data(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number, inputs, target of every sample. The noise keeps the loss away from zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    y = x.sum(1) + torch.randn(size, generator=generator)
    return torch.arange(size), x, y


class Samples(torch.utils.data.Dataset[Any]):
    """The same data, sample by sample; writes down which was asked for."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        trace(asked=index)
        return tuple(t[index] for t in self.tensors)


class Life:
    """Counts this rank's steps and lets happen what is to happen after them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        rank, step, what = os.environ.get("ECHELON_TEST_FAULT", "-1:0:").split(":")
        self.fault_step = int(step) if int(rank) == own_rank() else -1
        self.fault = what
        self.heard = False
        if what == "hear":
            self._listen()
        optimizer.register_step_post_hook(self._stepped)

    def _listen(self) -> None:
        """Before whoever listens already."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, partial(self._hear, signal.getsignal(number)))

    def _hear(self, listener: Any, number: int, frame: Any) -> None:
        self.heard = True
        listener(number, frame)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        numbers, x, y = batch
        if model.training:
            trace(batch=self.steps + 1, samples=numbers.tolist())
        return model(x).squeeze(-1), y

    def predict_rating(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        _, user, item, rating = batch
        return model(user, item), rating

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        trace(step=self.steps, clock=time.monotonic(), lr=optimizer.param_groups[0]["lr"])
        if pause := os.environ.get("ECHELON_TEST_PAUSE_S"):
            time.sleep(float(pause))  # a step that takes a while
        if self.steps != self.fault_step:
            return
        while (after := os.environ.get("ECHELON_TEST_AFTER")) and not Path(after).exists():
            time.sleep(0.001)
        if self.fault in ("wait", "hear"):
            trace(waiting=True)
            while not self.heard:
                time.sleep(0.01)
        if self.fault not in ("hear", "go"):
            os.kill(os.getpid(), getattr(signal, f"SIG{self.fault}"))


def own_rank() -> int:
    return int(os.environ.get("ECHELON_TEST_RANK", os.environ.get("RANK", "0")))


def trace(**what: Any) -> None:
    if folder := os.environ.get("ECHELON_TEST_TRACE"):
        line = json.dumps({"rank": own_rank(), **what}) + "\n"
        with Path(folder, f"{own_rank()}-{os.getpid()}.jsonl").open("a") as file:
            file.write(line)


def _metrics() -> dict[str, Any]:
    from metric_set import metric_set

    return metric_set()
