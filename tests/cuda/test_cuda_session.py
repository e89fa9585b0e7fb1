"""Loops of one's own on a GPU: the numbers of the CPU, of two processes, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import session_loops
from test_cuda_training import echelon, losses

pytestmark = pytest.mark.gpu

LOOPS = Path(session_loops.__file__)
WORDS = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.log_steps=1", "trainer.save.steps=1")
TWO = ("launch=local", "launch.procs=2", "launch.share_devices=true")


@pytest.mark.parametrize("loop", ["regression", "adversaries", "tokens", "contrast"])
def test_the_numbers_are_those_of_a_cpu_and_of_two_processes(loop: str, tmp_path: Path) -> None:
    train = ("train", f"experiment={LOOPS}:{loop}", *WORDS)
    for name, words, variables in (
        ("cpu", (), {"CUDA_VISIBLE_DEVICES": ""}),
        ("gpu", (), {}),
        ("two", TWO, {}),
    ):
        done = echelon(tmp_path, *train, f"run.name={name}", *words, **variables)
        assert done.returncode == 0, done.stderr
        assert len(losses(tmp_path, name)) == 12
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "cpu"), rel=1e-3)


def test_killed_on_a_gpu_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    train = ("train", f"experiment={LOOPS}:regression", *WORDS, "dropout=0.3")
    assert echelon(tmp_path, *train, "run.name=whole").returncode == 0
    killed = echelon(tmp_path, *train, "run.name=cut", ECHELON_TEST_FAULT="0:6:KILL")
    assert killed.returncode != 0
    done = echelon(tmp_path, *train, "run.name=cut")
    assert done.returncode == 0, done.stderr
    assert "resuming run cut after step" in done.stderr
    assert losses(tmp_path, "cut") == losses(tmp_path, "whole")
