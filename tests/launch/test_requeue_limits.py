"""How often a run may start again in another job, over everything that has happened to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, ExitCode
from echelon.launch.registry import make_launcher
from echelon.launch.slurm import requeue
from echelon.runs.failure import Failure
from echelon.runs.run_folder import Run

LAUNCH = LaunchConfig(kind="slurm", max_requeues=2, max_restarts=1)
LOST = Failure(1, "n2", 7, "node 1 is gone", "", int(ExitCode.NODE_LOST))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def begin_again(run: Run, state: str, step: int, launch: LaunchConfig = LAUNCH) -> int:
    """The next job, after the last one ended so and had saved this step."""
    run.update_status(state=state)
    (run.snapshots_folder / f"step-{step:09d}").mkdir(parents=True, exist_ok=True)
    return requeue.record_start(run, launch)


def refusal(run: Run, ends: Sequence[tuple[str, int]], launch: LaunchConfig = LAUNCH) -> str:
    """What is said at the last of these starts, and not before."""
    for state, step in ends[:-1]:
        begin_again(run, state, step, launch)
    with pytest.raises(EchelonError) as caught:
        begin_again(run, *ends[-1], launch)
    assert caught.value.exit == ExitCode.FAILED
    return str(caught.value)


def test_running_out_of_time_has_its_own_limit(run: Run) -> None:
    ends = [("queued", 0), ("preempted", 5), ("preempted", 10), ("preempted", 15)]
    said = refusal(run, ends)
    assert said.startswith(
        f"run {run.name} was preempted or lost a node 3 times, and launch.max_requeues=2"
    )
    assert f"raise launch.max_requeues, then `echelon resume {run.name}`" in said


def test_failures_have_their_own_limit(run: Run) -> None:
    said = refusal(run, [("queued", 0), ("preempted", 5), ("failed", 10), ("failed", 15)])
    assert said.startswith(f"run {run.name} has failed 2 times, and launch.max_restarts=1")


def test_a_job_that_died_without_a_word_went_with_its_node(run: Run) -> None:
    ends = [("queued", 0), ("running", 5), ("running", 10), ("preempted", 15)]
    assert "was preempted or lost a node 3 times" in refusal(run, ends)


def test_what_is_left_is_counted_over_all_jobs(run: Run) -> None:
    launch = replace(LAUNCH, max_restarts=3)
    assert begin_again(run, "queued", 0, launch) == 3
    assert begin_again(run, "preempted", 5, launch) == 3
    assert begin_again(run, "failed", 10, launch) == 2


def test_three_starts_from_one_step_are_enough(run: Run) -> None:
    said = refusal(run, [("queued", 5), ("preempted", 5), ("preempted", 5)])
    assert "was started 3 times in a row from step 5 and got no further" in said


def test_a_run_that_gets_further_now_and_then_goes_on(run: Run) -> None:
    launch = replace(LAUNCH, max_requeues=100)
    for step in (0, 0, 3, 3, 9, 9, 12):
        begin_again(run, "preempted", step, launch)


def test_a_finished_run_counts_anew(run: Run) -> None:
    for state in ("queued", "preempted", "preempted", "finished", "preempted"):
        begin_again(run, state, run.find_newest_step() + 1)
    assert len(run.read_status_file()["starts"]) == 2


@pytest.mark.parametrize(
    ("launch", "failure", "again"),
    [
        (LAUNCH, LOST, True),
        (LAUNCH, replace(LOST, exit=int(ExitCode.FAILED)), False),
        (replace(LAUNCH, max_restarts=0), LOST, True),
        (replace(LAUNCH, max_requeues=0), LOST, False),
        (replace(LAUNCH, kind="env"), LOST, False),
    ],
    ids=[
        "node lost",
        "code at fault",
        "no restarts needed",
        "no requeues wanted",
        "no script to do it",
    ],
)
def test_only_a_lost_node_is_worth_another_job(
    run: Run, launch: LaunchConfig, failure: Failure, again: bool
) -> None:
    config = Config(launch=launch)
    make_launcher(config).record_failure(run, config, failure)
    assert run.read_status_file()["failure"] == asdict(failure)
    assert (run.folder / requeue.REQUEUE_FILE).exists() is again


def test_the_wish_to_requeue_is_gone_once_it_is_granted(run: Run) -> None:
    once = replace(LAUNCH, max_requeues=1)
    requeue.request_requeue_if_node_lost(run, once, LOST)
    begin_again(run, "preempted", 5, once)
    assert not (run.folder / requeue.REQUEUE_FILE).exists()
    requeue.request_requeue_if_node_lost(run, once, LOST)  # the one that may be is used up
    assert not (run.folder / requeue.REQUEUE_FILE).exists()
