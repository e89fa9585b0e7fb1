"""The history that real trainings leave: killed, resumed with another number of processes."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from command_runner import ECHELON, HERE, metrics, status, until
from worlds import run_forked, started_forked

from echelon.runs.accounting import account_for_run
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


def test_a_rank_that_is_killed_is_a_round_and_its_time_is_accounted_for(tmp_path: Path) -> None:
    faulty = f"experiment={HERE / 'faulty_experiment.py'}:experiment"
    fault = ["fault=kill", "on=1", "phase=step", "at=13", f"once={tmp_path}/once"]
    size = ["launch=local", "launch.procs=3", "trainer.batch_size=8", "trainer.epochs=8"]
    pace = ["pause_s=0.04", "missing_pause_s=1"]
    done = run_forked([*ECHELON, "train", "run.name=a", faulty, *fault, *size, *pace], tmp_path)
    assert done.code == 0, done.err
    folder = tmp_path / "runs" / "a"
    history = read_history(Run(folder), is_running=False)
    (phase,) = history.phases
    first, *_, last = phase.rounds
    assert (first.number, first.processes, first.lost, first.joined) == (1, 2, (1,), ())
    assert first.step in (12, 13)  # the others may have made the step
    assert f"{first.reason}\n" in done.err
    assert (last.number, last.processes, last.lost, last.joined) == (2, 3, (), (1,))
    assert last.step > first.step
    assert all(0 < round_.standstill_s < phase.trained_s for round_ in phase.rounds)
    found = account_for_run(history)
    assert found is not None
    assert found.effective_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s)
    assert (found.starts, found.restarts, found.steps_redone, found.steps_kept) == (1, 0, 0, 80)
    assert (found.lost_ranks, found.replaced_ranks) == (1, 1)
    assert found.losses_by_host == {socket.gethostname(): 1}
    assert 0 <= found.lost_s["replaced_ranks"] <= sum(r.standstill_s for r in phase.rounds)
    assert status(folder)["accounting"] == found.to_json()
    assert re.search(r"effective +\d+\.\d % of .*; 1 start, 1 lost rank, 1 replacement", done.err)


def test_a_restart_and_the_steps_that_it_makes_again_are_accounted_for(tmp_path: Path) -> None:
    faulty = f"experiment={HERE / 'faulty_experiment.py'}:experiment"
    fault = ["fault=kill", "on=1", "phase=step", "at=18", f"once={tmp_path}/once", "pause_s=0.01"]
    size = ["launch=local", "launch.procs=2", "trainer.batch_size=8", "trainer.epochs=4"]
    restarts = ["launch.max_replacements=0", "launch.max_restarts=1", "trainer.log_steps=1"]
    done = run_forked([*ECHELON, "train", "run.name=a", faulty, *fault, *size, *restarts], tmp_path)
    assert done.code == 0, done.err
    history = read_history(Run(tmp_path / "runs" / "a"), is_running=False)
    first, second = history.phases
    assert (first.attempt, second.attempt, second.first_step) == (0, 1, 10)
    found = account_for_run(history)
    assert found is not None
    assert (found.restarts, found.requeues, found.steps_kept) == (1, 0, 40)
    assert first.last_step is not None
    assert found.steps_redone == first.last_step - 10
    assert found.lost_s["restarts"] > 0
    assert found.lost_s["redone_steps"] > 0
    assert found.effective_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s)
