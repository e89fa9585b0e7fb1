"""Trainings with random samples, samplers and batches of their own types."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, WeightedRandomSampler
from toy_experiments import Life, own_rank, trace

import echelon

SAMPLES = 17


@dataclass
class SampledSettings:
    order: str = ""
    """``weighted`` (a sampler), ``buckets`` (a batch sampler), ``growing`` (a curriculum),
    ``shares`` (a mistake: of one rank), or a shuffle."""
    bad_sample: int = -1
    """One that is not finite."""
    batch: str = ""
    """``dataclass``, ``graph`` (which moves itself and cannot be cut), or a tuple."""
    dropout: float = 0.0
    sums: bool = False
    """Whether the loss is a sum, in a way that Echelon does not know."""


class Augmented(Dataset[Any]):
    """Inputs of different lengths with noise from all three generators."""

    def __init__(self, bad_sample: int) -> None:
        self.bad_sample = bad_sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        noise = random.gauss(0, 0.3) + np.random.randn() * 0.3 + torch.randn(2 + index % 3) * 0.3
        noise[0] += math.inf if index == self.bad_sample else 0.0
        return index, noise + index / SAMPLES, torch.tensor(index % 5 / 5)


@dataclass
class Padded:
    numbers: Tensor
    x: Tensor
    y: Tensor


class Graphs:
    def __init__(self, padded: Padded) -> None:
        self.padded = padded

    def to(self, device: torch.device) -> Graphs:
        return self


def pad(samples: list[tuple[int, Tensor, Tensor]]) -> Padded:
    numbers, inputs, targets = zip(*samples, strict=True)
    x = torch.zeros(len(samples), 4)
    for row, values in zip(x, inputs, strict=True):
        row[: len(values)] = values
    return Padded(torch.tensor(numbers), x, torch.stack(targets))


def pad_columns(samples: list[Any]) -> tuple[Tensor, ...]:
    padded = pad(samples)
    return padded.numbers, padded.x, padded.y


def pad_graphs(samples: list[Any]) -> Graphs:
    return Graphs(pad(samples))


class Buckets:
    """Batches of samples of one length, in another order in every epoch."""

    def __init__(self) -> None:
        self.batches = [list(range(length, SAMPLES, 3)) for length in range(3)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


class Growing:
    def set_epoch(self, epoch: int) -> None:
        self.count = min(SAMPLES, 7 + 4 * epoch)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())


def sum_squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def sampled(cfg: SampledSettings) -> echelon.Experiment:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(cfg.dropout), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    life = Life(optimizer)

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        padded = batch.padded if isinstance(batch, Graphs) else batch
        if isinstance(padded, tuple):
            padded = Padded(*padded)
        if model.training:
            trace(batch=life.steps + 1, samples=padded.numbers.tolist())
        return model(padded.x).squeeze(-1), padded.y

    weights = [1.0 + 9.0 * (index % 4 == 0) for index in range(SAMPLES)]
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler(weights, 14),
        "growing": Growing(),
        "shares": range(own_rank(), SAMPLES - 1, 2),
    }
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=sum_squares if cfg.sums else nn.functional.mse_loss,
        train_data=Augmented(cfg.bad_sample),
        predict=predict,
        collate_fn={"dataclass": pad, "graph": pad_graphs}.get(cfg.batch, pad_columns),
        sampler=samplers.get(cfg.order),
        batch_sampler=Buckets() if cfg.order == "buckets" else None,
    )
