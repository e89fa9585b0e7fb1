"""Which value of a metric is the best, and what is refused before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification
from worlds import metrics, train_world

import echelon
from echelon.config.compose import compose
from echelon.errors import EchelonError
from echelon.runs.metric_direction import guess_best_is
from echelon.runs.record import read_run_records
from echelon.snapshot.layout import find_best
from echelon.train.best_metric import resolve_best_metric

MULTICLASS = classification.MulticlassAccuracy(3)


class Curious(torchmetrics.MeanMetric):
    """Says nothing of what is better."""


@pytest.mark.parametrize(
    ("name", "metric", "best_is"),
    [
        ("accuracy", MULTICLASS, "max"),
        ("quality", MULTICLASS, "max"),  # torchmetrics knows
        ("quality_2", MULTICLASS, "max"),  # of one class
        ("quality", torchmetrics.MeanSquaredError(), "min"),
        ("score", torchmetrics.MeanSquaredError(), "min"),
        ("top1_accuracy", Curious(), "max"),  # the name does
        ("perplexity", Curious(), "min"),
        ("both_error", Curious(), "min"),  # of a metric with results of these names
        ("both_f1", Curious(), "max"),
    ],
)
def test_what_is_better_is_known(name: str, metric: Any, best_is: str) -> None:
    owner = name.partition("_")[0] if name.startswith(("both", "quality")) else name
    config = resolve_best_metric(compose([f"trainer.best={name}"]), {owner: metric})
    assert config.trainer.best_is == best_is
    given = compose([f"trainer.best={name}", "trainer.best_is=min"])
    assert resolve_best_metric(given, {owner: metric}).trainer.best_is == "min"


def test_the_loss_needs_no_metric() -> None:
    assert resolve_best_metric(compose([]), None).trainer.best_is == "min"
    assert resolve_best_metric(compose([]), {}).trainer.best_is == "min"


@pytest.mark.parametrize(
    ("words", "known", "what", "do"),
    [
        (["trainer.best=curious"], {"curious": Curious()}, "neither Curious nor the name", "max"),
        (["trainer.best=acuracy"], {"accuracy": MULTICLASS}, "no such number", "'accuracy'"),
        (["trainer.best=accuracy"], None, "has no eval_data", "eval_data"),
    ],
)
def test_what_is_not_known_is_refused(
    words: list[str], known: dict[str, Any] | None, what: str, do: str
) -> None:
    with pytest.raises(EchelonError) as refused:
        resolve_best_metric(compose(words), known)
    [fault] = refused.value.faults
    assert what in fault.what
    assert do in fault.do


@pytest.mark.parametrize(
    ("name", "best_is"),
    [
        *((name, "max") for name in ("val_acc", "BinaryAUROC", "f1", "r2_score", "kappa", "mIoU")),
        *((name, "min") for name in ("RMSE", "cross_entropy", "brier_score", "WER", "eval_nll")),
        *((name, None) for name in ("curious", "accuracy_loss", "mapping", "entropy")),
    ],
)
def test_what_a_name_says(name: str, best_is: str | None) -> None:
    assert guess_best_is(name) == best_is


# --- trained ---


@dataclass
class Settings:
    lr: float = 0.5


def classify(cfg: Settings) -> echelon.Experiment:
    """It learns, then forgets all it learned."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 4, generator=generator)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 6 else -1)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.cross_entropy,
        train_data=(x, (x[:, 0] > 0).long()),
        eval_data=(x, (x[:, 0] > 0).long()),
        metrics=make_metrics,
        schedule=schedule,
    )


def make_metrics() -> dict[str, Any]:
    each = classification.MulticlassAccuracy(2, average=None)
    return {"accuracy": classification.MulticlassAccuracy(2), "each": each}


SHORT = ("trainer.batch_size=8", "trainer.steps=14", "trainer.evaluate.steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_highest_accuracy_is_kept(tmp_path: Path, ranks: int) -> None:
    words = (*SHORT, "trainer.best=accuracy", "trainer.keep_last=1")
    ended = train_world(tmp_path, ranks, *words, experiment=classify)
    assert ended.codes == [0] * ranks, ended.said
    values = {m["step"]: m["eval_accuracy"] for m in metrics(ended.run) if "eval_accuracy" in m}
    assert values[14] < max(values.values())
    best = find_best(ended.run.snapshots_folder)
    assert best is not None
    assert values[int(best.name[5:])] == max(values.values())
    assert ended.run.read_status_file()["best"] == max(values.values())
    [record], _ = read_run_records([ended.run])
    assert record.best_is == "max"


@pytest.mark.slow
@pytest.mark.parametrize(
    "best", ["acuracy", "each", "each_2"], ids=["misspelt", "of all classes", "of no class"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_name_that_is_not_evaluated_costs_no_step(tmp_path: Path, best: str, ranks: int) -> None:
    ended = train_world(tmp_path, ranks, *SHORT, f"trainer.best={best}", experiment=classify)
    assert ended.codes == [2] * ranks, ended.said
    assert f"trainer.best={best}, but no such number is evaluated" in ended.said
    assert "accuracy" in ended.said.partition("hint: ")[2]
    assert metrics(ended.run) == []
