"""The history that real trainings leave: killed, resumed with another number of processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_runner import ECHELON, metrics, until
from worlds import run_forked, started_forked

from echelon.runs.history import read_history
from echelon.runs.metrics_summary import load_summary
from echelon.runs.run_folder import Run

pytestmark = pytest.mark.slow

TRAIN = (*ECHELON, "train", "run.name=a", "trainer.log_steps=1", "trainer.save.steps=5")


def test_a_run_that_was_killed_and_went_on_with_more_processes(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    words = [*TRAIN, "launch=local", "launch.procs=2", "trainer.steps=1000000"]
    with started_forked(words, tmp_path) as training:
        until(lambda: Run(folder).read_status_file().get("snapshot"), 300, "a snapshot")
        training.end()
    killed_at = metrics(folder)[-1]["step"]
    run_folder = Run(folder)
    (first,) = read_history(run_folder, is_running=False).phases
    assert (first.processes, first.first_step, first.last_step) == (2, 0, killed_at)
    assert first.cause == "killed"
    resumed_at = run_folder.find_newest_step()
    words = [*ECHELON, "resume", "a", "launch.procs=3", f"trainer.steps={killed_at + 20}"]
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    first, second = read_history(run_folder, is_running=False).phases
    assert (first.last_step, first.cause) == (killed_at, "killed"), "written down before the cut"
    assert (second.processes, second.first_step, second.cause) == (3, resumed_at, "finished")
    assert second.last_step == killed_at + 20
    assert f"finished {killed_at + 20 - resumed_at} steps in" in done.err.replace(",", "")
    assert re.search(rf"the whole run: {killed_at + 20:,} steps in", done.err)
    summary = load_summary(run_folder)
    assert summary.offset == run_folder.metrics_file.stat().st_size
    assert summary.metrics["loss"].count == killed_at + 20


def test_one_process_that_failed_and_a_program(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import echelon\ndef experiment(cfg):\n    raise RuntimeError('no data')\n"
    )
    failed = run_forked([*TRAIN, "experiment=own.py:experiment"], tmp_path)
    assert failed.code != 0
    (phase,) = read_history(Run(tmp_path / "runs" / "a"), is_running=False).phases
    assert (phase.launcher, phase.processes, phase.trained_since) == ("inline", 1, None)
    assert "no data" in phase.cause
    done = run_forked(
        [*ECHELON, "run", "run.name=p", "launch=local", "launch.procs=2", "--", "true"], tmp_path
    )
    assert done.code == 0, done.err
    (program,) = read_history(Run(tmp_path / "runs" / "p"), is_running=False).phases
    assert (program.launcher, program.processes, program.cause) == ("local", 2, "finished")
    assert program.trained_since is not None
