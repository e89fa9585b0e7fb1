"""Trainings over a stream: with a loss, with a step of their own, and in a loop of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numbered_streams import numbered_stream
from torch import Tensor, nn
from torch.utils.data import Subset
from toy_experiments import Life, own_rank, trace

import echelon
from echelon.data.sharded_stream import ShardedStream


@dataclass
class StreamedSettings:
    kind: str = "plain"
    """Of the shards, see `numbered_streams`; or a mistake: ``raising``, ``empty``, ``unsavable``,
    ``of_ranks`` (other shards on each), ``divided`` (other samples on each)."""
    shards: int = 4
    every_epochs: int = 0
    dropout: float = 0.0


def make_stream(cfg: StreamedSettings) -> ShardedStream:
    if cfg.kind == "of_ranks":
        return numbered_stream("plain", 1 + own_rank())
    mistakes = {
        "raising": raise_in_shard,
        "empty": make_empty,
        "unsavable": Unsavable,
        "divided": divide_among_ranks,
    }
    if cfg.kind in mistakes:
        return echelon.data.stream(mistakes[cfg.kind], cfg.shards)
    return numbered_stream(cfg.kind, cfg.shards)


def raise_in_shard(shard: int, shards: int) -> Iterator[Tensor]:
    for number in range(8):
        if (shard, number) == (3, 5):
            raise ValueError("a line that is no JSON")
        yield torch.tensor([shard, 0.0, number, 0.5])


def make_empty(shard: int, shards: int) -> list[Tensor]:
    return [torch.zeros(4)] * (shard != 2)


def divide_among_ranks(shard: int, shards: int) -> list[Tensor]:
    return [torch.tensor([shard, 0.0, number, 0.5]) for number in range(own_rank(), 20, 2)]


class Unsavable:
    def __init__(self, shard: int, shards: int) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(4)

    def state_dict(self) -> Any:
        return {"file": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing was saved")


def make_columns(samples: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    shard, epoch, number, noise = torch.stack(samples).unbind(1)
    x = torch.stack([noise, shard / 4, number / 7], 1).float()
    return (1000 * shard + 100 * epoch + number).long(), x, x.sum(1)


def make_parts(cfg: StreamedSettings) -> tuple[nn.Module, torch.optim.Optimizer, Life]:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(cfg.dropout), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, Life(optimizer)


def streamed(cfg: StreamedSettings) -> echelon.Experiment:
    model, optimizer, life = make_parts(cfg)
    rows = [torch.tensor([0.0, 0.0, number, 0.5]) for number in range(6)]
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=make_stream(cfg),
        eval_data=Subset(rows, range(len(rows))),  # type: ignore[arg-type]
        predict=life.predict,
        collate_fn=make_columns,
    )


def streamed_step(cfg: StreamedSettings) -> echelon.Experiment:
    model, optimizer, life = make_parts(cfg)

    def step(batch: Any, session: echelon.Session) -> dict[str, Tensor]:
        trace(batch=session.completed_steps + 1, samples=batch[0].tolist())
        loss = nn.functional.mse_loss(*life.predict(model.eval(), batch))
        session.backward(loss)
        session.step(optimizer)
        return {"loss": loss}

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        train_data=make_stream(cfg),
        collate_fn=make_columns,
        step=step,
    )


def streamed_loop(cfg: StreamedSettings, session: echelon.Session) -> None:
    model, optimizer, life = make_parts(cfg)
    session.prepare(model, optimizer)
    life.steps = session.completed_steps
    for numbers, x, y in session.batches(make_stream(cfg), collate_fn=make_columns):
        trace(batch=session.completed_steps + 1, samples=numbers.tolist())
        loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
        if cfg.every_epochs and session.every(epochs=cfg.every_epochs):
            raise AssertionError("a stream has no epochs")
