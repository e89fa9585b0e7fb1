"""Steps of one's own as CUDA graphs: the numbers of plain steps, and the reason where there is no
graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import user_steps
from test_cuda_training import echelon

from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu

FILE = Path(user_steps.__file__)
WORDS = ("trainer.batch_size=32", "trainer.epochs=3", "trainer.log_steps=7")
"""62 whole batches and a smaller one an epoch: captured steps beside plain ones."""


def train(folder: Path, name: str, experiment: str, *words: str) -> tuple[list[Any], str]:
    done = echelon(
        folder, "train", f"experiment={FILE}:{experiment}", f"run.name={name}", *WORDS, *words
    )
    assert done.returncode == 0, done.stderr
    lines = read_metrics(folder / "runs" / name / "metrics.jsonl")
    numbers = [
        [line[key] for key in sorted(line) if key.startswith(("loss", "norm", "one", "eval"))]
        for line in lines
    ]
    assert numbers
    return numbers, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("adversaries",),
        ("adversaries", "dropout=0.3", "norm=true", "scheduled=true"),
        ("adversaries", "optimizer=SGD", "scheduled=true", "trainer.ema=0.99"),
        ("adversaries", "optimizer=Scaled"),
        ("adversaries", "optimizer=Scaled", "scheduled=true"),
        ("counted", "trainer.evaluate.steps=50", "trainer.save.steps=50", "trainer.best=error"),
        ("annealed", "samples=8000", "trainer.best=error"),
    ],
    ids=" ".join,
)
def test_captured_steps_have_the_numbers_of_plain_ones(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    captured, _ = train(tmp_path, "captured", *words, "trainer.capture=always")
    plain, _ = train(tmp_path, "plain", *words, "trainer.capture=never")
    assert len(captured) == len(plain)
    for a, b in zip(captured, plain, strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("counts=true",), "the step's counter changes from step to step"),
        (("asks=true",), "it calls session.every, which the host answers"),
        (("optimizer=ReadingScaled", "scheduled=true"), "AcceleratorError"),
        (("optimizer=Adagrad",), ".state changes from step to step"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(
    words: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    refused = echelon(
        *(tmp_path, "train", f"experiment={FILE}:adversaries", "run.name=a", *WORDS),
        *(*words, "trainer.capture=always"),
    )
    assert refused.returncode != 0
    assert "trainer.capture=always, but the step cannot be a CUDA graph: " in refused.stderr
    assert reason in refused.stderr
    train(tmp_path, "b", "adversaries", *words)


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ("adversaries", "dropout=0.3", "scheduled=true", "transforms=true")
    more = ("trainer.capture=always", "trainer.save.steps=20", "trainer.log_steps=1")
    whole, _ = train(tmp_path, "whole", *words, *more)
    first = echelon(
        *(tmp_path, "train", f"experiment={FILE}:adversaries", "run.name=cut", *WORDS),
        *(*words[1:], *more),
        ECHELON_TEST_KILL_AT="110",
    )
    assert first.returncode != 0
    cut, said = train(tmp_path, "cut", *words, *more)
    assert "resuming run cut after step" in said
    assert cut == whole


def test_a_step_is_captured_by_default_or_the_reason_is_said(tmp_path: Path) -> None:
    _, said = train(tmp_path, "captured", "adversaries")
    assert "not captured" not in said
    plain, said = train(tmp_path, "asking", "adversaries", "asks=true")
    assert (
        "the step is not captured as a CUDA graph: it calls session.every, which the host answers"
    ) in said
    never, _ = train(tmp_path, "never", "adversaries", "asks=true", "trainer.capture=never")
    # Its optimizers were made ready for a graph, and adversaries enlarge every rounding.
    for a, b in zip(plain[:8], never[:8], strict=True):
        assert a == pytest.approx(b, rel=1e-2, abs=1e-4)


def test_a_snapshot_of_captured_steps_goes_on_without_a_gpu(tmp_path: Path) -> None:
    words = ("adversaries", "scheduled=true")
    train(tmp_path, "a", *words, "trainer.capture=always", "trainer.epochs=2")
    done = echelon(
        *(tmp_path, "train", f"experiment={FILE}:adversaries", "run.name=a", *WORDS),
        "scheduled=true",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")[-1]["step"] == 189


def test_models_are_compiled_with_the_step_captured(tmp_path: Path) -> None:
    compiled, said = train(
        tmp_path, "compiled", "adversaries", "trainer.compile=true", "trainer.capture=always"
    )
    assert "not compiled" not in said
    plain, _ = train(tmp_path, "plain", "adversaries", "trainer.capture=never")
    for a, b in zip(compiled, plain, strict=True):
        assert a == pytest.approx(b, rel=5e-3, abs=1e-4)
