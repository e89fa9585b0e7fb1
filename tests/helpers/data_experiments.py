"""Trainings over every kind of data, whose samples say which they are and are traced.

The files of a kind have different numbers of samples, which no batch and no number of processes
divides. Every sample adds noise from all three generators.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numbered_streams import numbered_stream
from PIL import Image
from streamed_experiments import make_columns
from torch import Tensor, nn
from toy_experiments import trace

import echelon

FILE_SAMPLES = (11, 7, 13)
SAMPLES = sum(FILE_SAMPLES)
MIXED_OFFSET = 1000
"""Added to the numbers of the second source of a mixture."""
TOKENS_LENGTH = 4


@dataclass
class DataSettings:
    kind: str = "tar"
    folder: str = ""


# --- files --------------------------------------------------------------------------------------


def write_data(folder: Path) -> None:
    """Writes the files of all kinds."""
    first = 0
    for file, count in enumerate(FILE_SAMPLES):
        rows = [_make_row(number) for number in range(first, first + count)]
        for kind, write in WRITERS.items():
            (folder / kind).mkdir(parents=True, exist_ok=True)
            write(folder / kind, f"part-{file}", rows)
        first += count


def _make_row(number: int) -> dict[str, Any]:
    x = np.random.default_rng(number).normal(size=3).astype(np.float32)
    return {"number": number, "x": x.tolist()}


Rows = Sequence[dict[str, Any]]


def _write_tar(folder: Path, name: str, rows: Rows) -> None:
    with tarfile.open(folder / f"{name}.tar", "w") as tar:
        for row in rows:
            content = json.dumps(row).encode()
            info = tarfile.TarInfo(f"n{row['number']:03}.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _write_parquet(folder: Path, name: str, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / f"{name}.parquet", row_group_size=3)


def _write_jsonl(folder: Path, name: str, rows: Rows) -> None:
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _write_npy(folder: Path, name: str, rows: Rows) -> None:
    values = [(row["number"], row["x"]) for row in rows]
    np.save(folder / f"{name}.npy", np.array(values, [("number", "<i8"), ("x", "<f4", 3)]))


def _write_tokens(folder: Path, name: str, rows: Rows) -> None:
    """A window's first token is 4 times its number; one more is the last target."""
    first = TOKENS_LENGTH * rows[0]["number"]
    tokens = np.arange(first, first + TOKENS_LENGTH * len(rows) + 1, dtype=np.uint16)
    tokens.tofile(folder / f"{name}.bin")


def _write_picture(folder: Path, name: str, rows: Rows) -> None:
    (folder / name).mkdir()
    for row in rows:
        pixels = np.full((2, 2, 3), row["number"], np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{row['number']:03}.png")


WRITERS: dict[str, Callable[[Path, str, Rows], None]] = {
    "tar": _write_tar,
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "npy": _write_npy,
    "tokens": _write_tokens,
    "images": _write_picture,
}


# --- samples ------------------------------------------------------------------------------------


def make_sample(number: int, x: Any) -> tuple[int, Tensor, Tensor]:
    noise = random.gauss(0, 0.1) + np.random.randn() * 0.1 + torch.randn(3) * 0.1
    values = torch.as_tensor(np.asarray(x, np.float32))
    return number, values + noise, values.sum()


def from_row(row: dict[str, Any]) -> tuple[int, Tensor, Tensor]:
    row = row.get("json", row)
    return make_sample(int(row["number"]), row["x"])


def from_mixed_row(row: dict[str, Any]) -> tuple[int, Tensor, Tensor]:
    number, x, y = from_row(row)
    return number + MIXED_OFFSET, x, y


def from_tokens(window: dict[str, Tensor]) -> tuple[int, Tensor, Tensor]:
    inputs = window["inputs"]
    return make_sample(int(inputs[0]) // TOKENS_LENGTH, inputs[:3] / 100)


def from_picture(sample: dict[str, Any]) -> tuple[int, Tensor, Tensor]:
    number = np.asarray(sample["image"])[0, 0]
    return make_sample(int(number[0]), number / 32)


class ShuffledBuckets:
    """A batch sampler: batches of several sizes, in another order in every epoch."""

    def __init__(self) -> None:
        borders = [0, 7, 12, 21, 22, SAMPLES]
        self.batches = [[*range(a, b)] for a, b in pairwise(borders)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


def open_data(kind: str, folder: Path) -> Any:
    """Return the data of a kind, with an order in windows of about two chunks where it has some."""
    if kind in ("stream", "stateful_stream"):
        return numbered_stream("stateful" if kind == "stateful_stream" else "plain", shards=3)
    if kind == "mixture":
        sources = {
            "rows": open_data("parquet", folder),
            "tars": echelon.data.open(folder / "tar", transform=from_mixed_row),
        }
        return echelon.data.mix(sources, weights={"rows": 0.7, "tars": 0.3})
    if kind == "tokens":
        files = folder / "tokens"
        data = echelon.data.open_tokens(files, length=TOKENS_LENGTH, transform=from_tokens)
    else:
        path = folder / ("parquet" if kind == "batch_sampler" else kind)
        data = echelon.data.open(path, transform=from_picture if kind == "images" else from_row)
    data.window_bytes = 2 * int(data.chunks.sizes_bytes.max())
    return data


KINDS = (*WRITERS, "stream", "stateful_stream", "mixture", "batch_sampler")


def train_on_data(cfg: DataSettings, training: echelon.TrainingInfo) -> echelon.Experiment:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = training.step

    def count_step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count_step)

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        numbers, x, y = batch
        if model.training:
            trace(batch=steps + 1, samples=numbers.tolist(), world_size=training.world_size)
        return model(x).squeeze(-1), y

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.mse_loss,
        train_data=open_data(cfg.kind, Path(cfg.folder)),
        predict=predict,
        collate_fn=make_columns if cfg.kind.endswith("stream") else None,
        batch_sampler=ShuffledBuckets() if cfg.kind == "batch_sampler" else None,
    )
