"""A run's history is written down: its starts and stops, where, how many, and why it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, echelon, lines, make_run, write_phases

from echelon.runs.history import read_history, record_start, record_stop, record_training
from echelon.runs.run_folder import Run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_resumed_run(root: Path) -> Run:
    """20 steps in 20 s on one process; after a pause of 15 minutes 20 in 10 s on two."""
    late = [
        {**li, "time": STARTED + 900 + li["step"] / 2} if "time" in li else li for li in lines()
    ]
    run = make_run(root, "a", lines()[:22] + late[22:], status={"step": 40, "total_steps": 40})
    write_phases(run, (STARTED, STARTED + 20, 0, 20))
    write_phases(run, (STARTED + 910, STARTED + 920, 20, 40), processes=2)
    return run


def test_starts_and_stops_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    record_start(run, "local", 2, 8, "77")
    record_training(run, 100, 3200)
    record_stop(run, 150, 4800, "failed: \n out of  memory")
    record_stop(run, 150, None, "the agent says it once more")
    (phase,) = read_history(run, is_running=False).phases
    assert (phase.launcher, phase.nodes, phase.processes, phase.job) == ("local", 2, 8, "77")
    assert (phase.first_step, phase.last_step, phase.steps, phase.samples) == (100, 150, 50, 1600)
    assert phase.cause == "failed: out of memory"


def test_a_start_says_how_often_its_processes_were_started_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    counts = {"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "1"}
    for env in (counts, {"SLURM_RESTART_COUNT": "?"}, None):
        record_start(run, "slurm", 1, 2, "77", env=env)
    phases = read_history(run, is_running=True).phases
    assert [(p.attempt, p.requeues) for p in phases] == [(2, 1), (0, 0), (None, None)]


def test_a_start_that_never_trained_is_no_training_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    record_start(run, "inline", 1, 1, None)
    record_stop(run, None, None, "failed: no data")
    history = read_history(run, is_running=False)
    assert len(history.phases) == 1
    assert history.trained_s is None


def test_a_killed_start_ended_with_its_last_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines(40))
    write_phases(run, (STARTED, None, 0, 0))
    (phase,) = read_history(run, is_running=False).phases
    assert (phase.ended, phase.last_step, phase.cause) == (STARTED + 40, 40, "killed")
    assert phase.trained_s == 40
    (running,) = read_history(run, is_running=True).phases
    assert running.ended is None


def test_the_next_start_writes_the_end_of_a_killed_one_down(tmp_path: Path) -> None:
    """It removes the lines after its snapshot, by which the end would be found."""
    run = make_run(tmp_path / "runs", "a", lines(40))
    write_phases(run, (STARTED, None, 0, 0))
    record_start(run, "local", 1, 1, None)
    run.metrics_file.write_text("")
    first, second = read_history(run, is_running=True).phases
    assert (first.ended, first.last_step, first.cause) == (STARTED + 40, 40, "killed")
    assert second.ended is None


def test_what_is_damaged_is_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    run.history_file.write_text('{"event": "stop", "time": 1}\n[]\n{"time": "x"}\n{"event": "sta')
    assert read_history(run, is_running=False).phases == ()
    run.history_file.unlink()
    run.history_file.mkdir()
    record_start(run, "local", 1, 1, None)
    assert read_history(run, is_running=False).phases == ()


def test_show_has_a_row_and_a_speed_for_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_resumed_run(tmp_path / "runs")
    code, out, err = echelon(capsys, "show", "a")
    assert (code, err) == (0, "")
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert "STARTED STEPS TIME SPEED SIZE WHERE ENDED" in shown
    first, second = (line for line in shown if "stopped by SIGTERM" in line)
    assert "0–20 20s 32 samples/s 1 × 1 local here" in first
    assert "20–40 10s 64 samples/s 1 × 2 local here" in second
    assert any(line.endswith("trained for 30s") for line in shown)
    data = json.loads(echelon(capsys, "show", "a", "--json")[1])
    assert data["trained_s"] == 30
    assert [phase["samples_per_s"] for phase in data["phases"]] == [32, 64]
    assert [phase["processes"] for phase in data["phases"]] == [1, 2]


def test_the_speed_of_now_is_that_of_the_last_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_steps(line: Any, ms: float) -> Any:
        return {**line, "compute_ms": ms} if "time" in line else line

    timed = [time_steps(line, 900.0 if line["step"] <= 38 else 100.0) for line in lines()]
    run = make_run(tmp_path / "runs", "a", timed)
    write_phases(run, (STARTED, STARTED + 38.5, 0, 38), (STARTED + 38.6, STARTED + 40, 38, 40))
    out = echelon(capsys, "show", "a")[1]
    assert "of a step: compute 100 ms" in out


def test_one_start_needs_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, STARTED + 40, 0, 40))
    assert "SPEED" not in echelon(capsys, "show", "a")[1]


def test_a_training_that_is_the_program_of_a_job_is_counted_once(tmp_path: Path) -> None:
    """The batch script writes its start, and the training within it its own."""
    run = make_run(tmp_path / "runs", "a")
    record_start(run, "slurm", 1, 1, "7")
    record_training(run, None, None)
    record_start(run, "inline", 1, 1, "7", is_within_program=True)
    record_training(run, 0, 0)
    record_stop(run, 10, 320, "finished")
    record_stop(run, None, None, "exit code 0")
    (phase,) = read_history(run, is_running=False).phases
    assert (phase.launcher, phase.steps, phase.cause) == ("inline", 10, "finished")
