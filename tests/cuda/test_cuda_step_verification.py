"""Steps on a GPU are verified: without a trace, and with a name where a rank is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import faulty_experiment
import pytest
from test_cuda_training import echelon, losses

pytestmark = pytest.mark.gpu

EXPERIMENTS = Path(__file__).parent / "capture_experiments.py"
FAULTY = Path(faulty_experiment.__file__)
SIZES = ("trainer.log_steps=1", "trainer.epochs=1", "trainer.batch_size=32")
THREE = ("launch=local", "launch.procs=3", "launch.share_devices=true")


@pytest.mark.parametrize(
    "words",
    [
        ["dropout=0.3", "norm=true", "optimizer=Adam"],
        ["dropout=0.3", "norm=true", "trainer.precision=fp16"],
        ["dropout=0.3", "trainer.compile=true"],
        ["dropout=0.3", "norm=true", "dataset=true", *THREE],
    ],
    ids=["float32", "fp16", "compiled", "three"],
)
def test_a_verified_run_has_the_numbers_of_any_other(words: list[str], tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:experiment", *SIZES, "trainer.capture=never", *words]
    for name, more in (("plain", ()), ("verified", ("trainer.verify_steps=5",))):
        done = echelon(tmp_path, "train", f"run.name={name}", *words, *more)
        assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path, "plain")) == 63
    assert losses(tmp_path, "verified") == losses(tmp_path, "plain")


def test_tables_are_verified(tmp_path: Path) -> None:
    words = [f"experiment={EXPERIMENTS}:tables", *SIZES, "trainer.verify_steps=5"]
    done = echelon(tmp_path, "train", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("replacements", [0, 3])
def test_the_wrong_one_is_named(replacements: int, tmp_path: Path) -> None:
    words = [f"experiment={FAULTY}:experiment", "trainer.batch_size=8", *THREE]
    words += ["trainer.verify_steps=1", f"launch.max_replacements={replacements}"]
    fault = ["fault=miscompute", "on=1", "at=9", f"once={tmp_path}/once", "missing_pause_s=1"]
    done = echelon(tmp_path, "train", *words, *fault)
    assert done.returncode == (0 if replacements else 10), done.stderr
    named = r"rank 1 on \S+ \(cuda:0, NVIDIA .*\) computes wrong numbers: in step 5 its gradients"
    assert re.search(named, done.stderr), done.stderr
