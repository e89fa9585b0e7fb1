"""Loops of one's own on a GPU: the numbers of the CPU, of two processes, and after a kill."""

from __future__ import annotations

import subprocess
import sys
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


SCRIPT = """
import torch, echelon

with echelon.session("run.name=a", "trainer.log_steps=1", "launch.share_devices=true") as session:
    data = torch.arange(64.0).view(64, 1) / 64
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for (x,) in session.batches((data,), batch_size=8, epochs=2):
        assert x.is_cuda
        loss = (model(x) - 2 * x).square().mean()
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
    session.print("on", session.device)
print("after the block")
"""


def test_a_script_has_a_session_on_a_gpu(tmp_path: Path) -> None:
    launchers: list[list[str]] = [[], ["-m", "torch.distributed.run", "--nproc_per_node=2"]]
    found = []
    for number, words in enumerate(launchers):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, *words, "script.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        assert "on cuda:0" in done.stderr
        assert done.stdout.count("after the block") == number + 1
        found.append(losses(folder, "a"))
    assert len(found[0]) == 16
    assert found[1] == pytest.approx(found[0], rel=1e-4)
