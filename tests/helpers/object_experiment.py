"""Trainings over rows of a `.npy` file, on a disk or in an object store, in several windows."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from toy_experiments import Life, trace

import echelon

ROW_BYTES = 128 << 10
ROWS = 360
"""45 MB, in 12 blocks."""
WINDOW_BYTES = 8 << 20


@dataclass
class ObjectSettings:
    path: str = ""


def make_rows() -> bytes:
    """A `.npy` file; the first number of a row is that of the row."""
    rows = np.random.default_rng(0).integers(0, 1000, (ROWS, ROW_BYTES // 2), np.int16)
    rows[:, 0] = np.arange(ROWS)
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def from_rows(cfg: ObjectSettings) -> echelon.Experiment:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    life = Life(optimizer)

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = batch["data"]
        if model.training:
            trace(batch=life.steps + 1, samples=rows[:, 0].tolist())
        return model(rows[:, 1:4].float() / 1000).squeeze(-1), rows[:, -1].float() / 1000

    dataset = echelon.data.open(cfg.path)
    dataset.window_bytes = WINDOW_BYTES  # type: ignore[attr-defined]
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=dataset,
        predict=predict,
    )
