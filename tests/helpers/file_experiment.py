"""Trainings from files, with a transform that draws random numbers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from toy_experiments import Life, trace

import echelon

ROWS = 17


@dataclass
class FileSettings:
    path: str = ""
    noise: bool = True
    """Whether a transform adds noise; without it, batches are read as columns."""


def write_training_files(folder: Path) -> None:
    """Writes the same rows as Parquet and as jsonl, in several files that no batch divides."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    for name, rows in (("a", range(7)), ("b", range(7, ROWS))):
        table = pa.table(
            {
                "number": pa.array(rows, pa.int64()),
                "x": pa.array([x[row].tolist() for row in rows], pa.list_(pa.float32())),
                "y": pa.array([float(x[row].sum()) for row in rows], pa.float32()),
            }
        )
        for kind in ("parquet", "jsonl"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / "parquet" / f"{name}.parquet", row_group_size=3)
        lines = [json.dumps(row) for row in table.to_pylist()]
        (folder / "jsonl" / f"{name}.jsonl").write_text("\n".join(lines))


def add_noise(sample: dict[str, Any]) -> dict[str, Any]:
    noise = random.gauss(0, 0.1) + np.random.randn() * 0.1 + float(torch.randn(())) * 0.1
    return {**sample, "x": sample["x"] + noise}


def from_files(cfg: FileSettings) -> echelon.Experiment:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    life = Life(optimizer)

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if model.training:
            trace(batch=life.steps + 1, samples=batch["number"].tolist())
        return model(batch["x"].float()).squeeze(-1), batch["y"].float()

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=echelon.data.open(cfg.path, transform=add_noise if cfg.noise else None),
        predict=predict,
    )
