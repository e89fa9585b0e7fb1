"""A few batches of the evaluation before the first step: found early, and without a trace."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from worlds import differing, metrics, snapshot_steps, state_at, train_world

import echelon

pytestmark = pytest.mark.slow

SHORT = (
    "trainer.batch_size=8",
    "trainer.eval_batch_size=4",
    "trainer.epochs=2",
    "trainer.save.steps=1",
    "trainer.keep_last=99",
)


@dataclass
class Settings:
    fails: str = ""
    """update: the metric fails at its first batch. compute: it fails with few samples. shape: the
    data has another shape. memory: there is none for more than one sample."""
    layers: int = 2


class Counting(torchmetrics.MeanMetric):
    """Says how many batches it has seen since it was made, over all evaluations."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def update(self, output: Tensor, target: Tensor) -> None:  # type: ignore[override]
        if self.fails == "update":
            raise TypeError("this metric takes labels")
        super().update(output - target)

    def compute(self) -> Tensor:
        if self.fails == "compute" and self.weight < 17:
            raise ValueError("too few samples")
        return super().compute()


class Restless(nn.Module):
    """Changes its buffers and draws random numbers in every mode, as few models do."""

    calls: Tensor

    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = [3] * layers
        self.layers = nn.Sequential(*(nn.Linear(n, 3) for n in sizes), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(()) + random.random() + np.random.random()
        return self.head(nn.functional.dropout(self.layers(x), 0.2)).squeeze(-1) + noise * 1e-3


def restless(cfg: Settings) -> echelon.Experiment:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator)
    y = x.sum(1)
    model = Restless(cfg.layers)

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor | None, Tensor]:
        x, y = batch
        if cfg.fails == "shape" and not model.training:
            x = x[:, :2]
        if cfg.fails == "memory" and not model.training and len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return None if cfg.fails == "no output" else model(x), y

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target) ** 2

    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=loss if cfg.fails == "vector" else nn.functional.mse_loss,
        train_data=(x, y),
        eval_data=(x[:17], y[:17]),
        metrics={"difference": Counting(cfg.fails)},
        predict=predict,
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ()),
        (2, ()),
        (3, ("trainer.eval_batch_size=3",)),
        (2, ("replica.kind=fsdp",)),
        (1, ("replica.devices=2",)),
        (2, ("trainer.accumulate=2", "trainer.sanity_steps=99")),
    ],
    ids=["alone", "two", "three", "fsdp", "stages", "all batches"],
)
def test_it_leaves_no_trace(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    runs = []
    for name, steps in (("with", ()), ("without", ("trainer.sanity_steps=0",))):
        ended = train_world(tmp_path, ranks, *SHORT, *words, *steps, name=name, experiment=restless)
        assert ended.codes == [0] * ranks, ended.said
        runs.append(ended.run)
    assert metrics(runs[0]) == metrics(runs[1])
    assert snapshot_steps(runs[0]) == snapshot_steps(runs[1])
    for step in (1, snapshot_steps(runs[0])[-1]):
        assert differing(state_at(runs[0], step), state_at(runs[1], step)) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("update", "TypeError: this metric takes labels"),
        ("compute", "ValueError: too few samples"),
        ("shape", "RuntimeError: mat1 and mat2"),
    ],
)
def test_a_failure_costs_no_step(tmp_path: Path, fails: str, said: str, ranks: int) -> None:
    ended = train_world(tmp_path, ranks, *SHORT, f"fails={fails}", experiment=restless)
    assert ended.codes == [1] * ranks, ended.said
    assert said in ended.said
    assert "failed before the first step" in ended.said
    assert "this was the check of the evaluation before the first step" in ended.said
    assert metrics(ended.run) == []


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (
            "vector",
            "the experiment's loss gave a tensor of shape (4,), but a step needs one number",
        ),
        ("no output", "the loss mse_loss was given no output"),
    ],
)
def test_mistakes_are_explained_as_in_a_step(tmp_path: Path, fails: str, said: str) -> None:
    ended = train_world(tmp_path, 1, *SHORT, f"fails={fails}", experiment=restless)
    assert ended.codes == [2], ended.said
    assert said in ended.said
    assert "Traceback" not in ended.said
    assert "before the first step" in ended.said


def test_a_metric_that_needs_more_samples_trains_without_it(tmp_path: Path) -> None:
    words = (*SHORT, "fails=compute", "trainer.sanity_steps=0")
    assert train_world(tmp_path, 1, *words, experiment=restless).codes == [0]


def test_memory_that_is_too_small_has_its_own_advice(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 1, *SHORT, "fails=memory", experiment=restless)
    assert ended.codes == [1], ended.said
    assert "it was the check of the evaluation before the first step" in ended.said
    assert "trainer.eval_batch_size=2" in ended.said
    assert "trainer.batch_size=" not in ended.said
    assert "nothing was trained yet, so nothing is lost" in ended.said


def test_a_run_that_has_evaluated_is_not_checked_again(tmp_path: Path) -> None:
    """A job that is queued again and again does not pay for it each time."""
    traced = tmp_path / "evaluated"
    words = (*SHORT, "trainer.evaluate.epochs=1")
    first = train_world(tmp_path, 1, *words, "trainer.epochs=1", experiment=counted)
    assert first.codes == [0], first.said
    again = train_world(
        tmp_path, 1, *words, experiment=counted, env={"ECHELON_TEST_COUNT": str(traced)}
    )
    assert again.codes == [0], again.said
    assert traced.read_text().count("evaluated\n") == 5, "the 17 samples at the end, and no more"


def counted(cfg: Settings) -> echelon.Experiment:
    experiment = restless(cfg)
    plain = experiment.predict
    assert plain is not None

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if not model.training and (path := os.environ.get("ECHELON_TEST_COUNT")):
            with Path(path).open("a") as file:
                file.write("evaluated\n")
        return plain(model, batch)

    experiment.predict = predict
    return experiment
