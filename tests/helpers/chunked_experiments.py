"""Trainings over a Dataset whose samples lie in chunks, some of which cannot be read.

`ECHELON_TEST_WINDOW_BYTES` changes the data of a run, whose settings may not change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from toy_experiments import Life, trace

import echelon
from echelon.data.formats.reader import BadSampleError, ChunkTable, SamplePlace


@dataclass
class ChunkedSettings:
    chunk_samples: list[int] = field(default_factory=lambda: [5, 0, 3, 7, 2, 6])
    bad: list[int] = field(default_factory=list)
    """The samples that cannot be read."""


class ChunkedSamples(Dataset[Any]):
    """A sample has ten bytes, so that a window of 80 has one to three chunks."""

    def __init__(self, cfg: ChunkedSettings) -> None:
        lengths = np.array(cfg.chunk_samples, np.int64)
        self.chunks = ChunkTable(np.concatenate([[0], np.cumsum(lengths)]), 10 * lengths)
        self.window_bytes = int(os.environ.get("ECHELON_TEST_WINDOW_BYTES", 80))
        self.bad = cfg.bad

    def __len__(self) -> int:
        return int(self.chunks.starts[-1])

    def __getitem__(self, row: int) -> tuple[int, Tensor, Tensor]:
        if row in self.bad:
            raise BadSampleError(self.locate(row), "it is cut short")
        return row, torch.randn(3) * 0.3 + row / 23, torch.tensor(row % 5 / 5)

    def locate(self, row: int) -> SamplePlace:
        chunk = int(self.chunks.starts.searchsorted(row, "right")) - 1
        return SamplePlace(Path(f"part-{chunk}.tar"), row - int(self.chunks.starts[chunk]))


def chunked(cfg: ChunkedSettings) -> echelon.Experiment:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    life = Life(optimizer)

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        numbers, x, y = batch
        if model.training:
            trace(batch=life.steps + 1, samples=numbers.tolist())
        return model(x).squeeze(-1), y

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=ChunkedSamples(cfg),
        predict=predict,
    )


def loop_over_chunks(cfg: ChunkedSettings, session: echelon.Session) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.prepare(model, optimizer)
    for numbers, x, y in session.batches(ChunkedSamples(cfg)):
        loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss.detach(), number=numbers.double().mean())
