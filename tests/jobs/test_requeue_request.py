"""`echelon cancel --requeue`, with stand-ins for Slurm's commands that write down what they are
asked; what a real cluster makes of the signal is tested in tests/cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_folders import echelon, make_run

from echelon.runs.run_folder import Run


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what scancel was asked. Job 7 runs."""
    folder, file = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()
    for name, text in {
        "squeue": "echo '7|RUNNING|None'",
        "scancel": f'echo "$@" >> {file}',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return file


def make_slurm_run(root: Path, name: str, job: str, max_requeues: int = 9, **config: object) -> Run:
    status = {"state": "running", "launcher": "slurm", "job": job}
    run = make_run(root, name, status=status)
    data = json.loads(run.config_file.read_text())
    data["launch"] |= {"kind": "slurm", "max_requeues": max_requeues}
    run.config_file.write_text(json.dumps(data | config))
    return run


def test_a_running_job_is_asked_to_save_and_go_on_in_another_one(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_slurm_run(tmp_path / "runs", "a", "7")
    code, out, _ = echelon(capsys, "cancel", "--requeue", "--dry-run", "a")
    assert (code, out) == (
        *(0, "run a: job 7 would be asked to save and end, and to be queued again\n"),
    )
    assert not asked.exists()
    code, out, _ = echelon(capsys, "cancel", "--requeue", "a")
    assert (code, asked.read_text()) == (0, "--signal=USR2 7\n")
    assert "was asked to save and end, and to be queued again" in out
    assert not (tmp_path / "runs/a/cancelled").exists()


def test_what_would_not_be_queued_again_is_refused(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "here")
    make_slurm_run(tmp_path / "runs", "program", "7", 0, program=["python", "train.py"])
    make_slurm_run(tmp_path / "runs", "ending", "7").cancel_file.touch()
    for name, reason in {
        "here": "does not run as a Slurm job",
        "program": "does not ask to be queued again",
        "ending": "was asked to end",
    }.items():
        code, _, err = echelon(capsys, "cancel", "--requeue", name)
        assert (code, reason in err) == (2, True), err
    assert not asked.exists()


def test_a_dry_run_of_cancel_touches_nothing(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_slurm_run(tmp_path / "runs", "a", "7")
    _, out, _ = echelon(capsys, "cancel", "--dry-run", "a")
    assert out == "run a: job 7 would be asked to save and end\n"
    _, out, _ = echelon(capsys, "cancel", "--dry-run", "--now", "a")
    assert out == "run a: job 7 would be killed; the last snapshot stands\n"
    assert not asked.exists()
    assert not run.cancel_file.exists()
