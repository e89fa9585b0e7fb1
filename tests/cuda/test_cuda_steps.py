"""Own steps, transformed batches and the ported trainings on a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import step_experiments
from test_cuda_capture import EXPERIMENTS, SIZES, both, train
from test_cuda_training import echelon, losses

from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu

STEPS = Path(step_experiments.__file__)
PORTS = Path(__file__).parents[2] / "examples" / "ports"
WORDS = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.log_steps=1", "trainer.save.steps=1")
TWO = ("launch=local", "launch.procs=2", "launch.share_devices=true")


@pytest.mark.parametrize("words", [("regression", "trainer.best=error"), ("sampled",)])
def test_an_own_step_has_the_numbers_of_a_cpu_and_of_two_processes(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("train", f"experiment={STEPS}:{words[0]}", *words[1:], *WORDS)
    for name, more, variables in (
        ("cpu", (), {"CUDA_VISIBLE_DEVICES": ""}),
        ("gpu", (), {}),
        ("two", TWO, {}),
    ):
        done = echelon(tmp_path, *words, f"run.name={name}", *more, **variables)
        assert done.returncode == 0, done.stderr
        assert len(losses(tmp_path, name)) == 12
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "cpu"), rel=1e-3)


def test_transformed_batches_are_captured(tmp_path: Path) -> None:
    experiment = f"experiment={EXPERIMENTS}:mixed"
    captured, plain = both(tmp_path, experiment)
    assert captured == pytest.approx(plain, rel=1e-4, abs=1e-6)
    unmixed, _ = train(tmp_path, "unmixed", f"experiment={EXPERIMENTS}:experiment")
    assert captured != pytest.approx(unmixed, rel=1e-2)


def test_transformed_batches_are_those_of_a_killed_run(tmp_path: Path) -> None:
    words = ("train", f"experiment={EXPERIMENTS}:mixed", "samples=320", *WORDS[2:], *SIZES[1:])
    assert echelon(tmp_path, *words, "run.name=whole").returncode == 0
    first = echelon(tmp_path, *words, "run.name=cut", "trainer.epochs=1")
    assert first.returncode == 0, first.stderr
    done = echelon(tmp_path, *words, "run.name=cut")
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path, "cut")) == 20
    assert losses(tmp_path, "cut") == pytest.approx(losses(tmp_path, "whole"), rel=1e-5)


@pytest.mark.parametrize("file", sorted(PORTS.glob("*.py")), ids=lambda file: file.stem)
def test_a_ported_training_runs_on_a_gpu(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(file), "run.name=a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "runs" / "a" / "metrics.jsonl")
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
