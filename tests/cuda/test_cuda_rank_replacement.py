"""A rank that shares a GPU with others is lost: they go on, and it is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faulty_experiment
import nccl_abort
import pytest
from test_cuda_training import echelon, losses

pytestmark = pytest.mark.gpu

EXPERIMENT = Path(faulty_experiment.__file__)
WORDS = ("trainer.batch_size=8", "trainer.epochs=4", "trainer.log_steps=1")
PACE = ("pause_s=0.05", "missing_pause_s=1")
THREE = ("launch=local", "launch.procs=3", "launch.share_devices=true")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_go_on_with_the_same_numbers(rank: int, tmp_path: Path) -> None:
    train = ("train", f"experiment={EXPERIMENT}:experiment", *WORDS, *PACE, *THREE)
    assert echelon(tmp_path, *train, "run.name=whole").returncode == 0
    fault = ("fault=kill", f"on={rank}", "at=13", f"once={tmp_path}/once")
    done = echelon(tmp_path, *train, *fault, "run.name=hit")
    assert done.returncode == 0, done.stderr
    assert f"lost rank {rank} on " in done.stderr
    assert f"rank {rank} replaced: 3 processes" in done.stderr
    assert len(losses(tmp_path, "hit")) == 40
    assert losses(tmp_path, "hit") == pytest.approx(losses(tmp_path, "whole"), rel=1e-4)


def test_a_communicator_of_nccl_is_ended_and_made_again(tmp_path: Path) -> None:
    """One GPU has one rank of NCCL, so no other rank can be lost: this much can be shown of it."""
    command = [sys.executable, nccl_abort.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"was_waiting": True, "is_right": True}
