"""Jobs of a real Slurm as `echelon jobs`, `logs`, `attach` and `cancel` see and end them, on the
kind of cluster that keeps accounts and on the kind that does not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line as desks
import pytest
from command_line import REGRESSION, Desk
from command_runner import until

from echelon.errors import Exit

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def standing(desk: Desk, name: str = "a", **variables: Any) -> dict[str, Any]:
    done = desk.type("jobs", "--json", **variables)
    assert done.code == 0, done.err
    (found,) = [job for job in json.loads(done.out) if job["run"] == name]
    return dict(found)


def test_a_job_is_followed_over_a_requeue_and_cancelled(desk: Desk) -> None:
    desk.variables["ECHELON_TEST_PAUSE_S"] = "0.05"
    words = ("launch.nodes=2", "launch.threads=1", "run.name=a", "trainer.log_steps=1")
    many = ("trainer.steps=100000", "trainer.batch_size=6", "eval_samples=0")
    waiting = desk.start("train", "launch=slurm", "--wait", *words, *many, REGRESSION)
    desk.job()
    follower = desk.start("logs", "a", "-f")
    desk.wait_for_step(3)
    found = standing(desk)
    assert (found["state"], found["job"]) == ("running", desk.job())
    assert (found["nodes"], found["world"], found["total_steps"]) == (2, 2, 100_000)
    assert found["step"] >= 3

    desk.cluster.slurm("scontrol", "requeue", desk.job())
    assert until(lambda: standing(desk)["state"] == "requeued", 120, "requeued")
    desk.wait_for_more()
    attached = desk.start("attach", "a")
    until(lambda: "running" in attached.told(), 120, "attached")
    assert "was asked to save and end" in desk.type("cancel", "a").out
    assert attached.wait().code == waiting.wait().code == Exit.PREEMPTED
    assert standing(desk)["state"] == "cancelled"
    assert "nothing to cancel" in desk.type("cancel", "a", "--now").out

    told = follower.wait()
    openings = [line for line in told.out.splitlines() if "100,000 steps" in line]
    assert (told.code, len(openings)) == (0, 2), told.out
    assert told.out.count("everything is saved") >= 1
    desk.require_nothing_left()


@pytest.fixture(params=["cluster", "accounted"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    with desks.opened(request.getfixturevalue(request.param), tmp_path) as opened:
        opened.variables["KIND"] = request.param
        yield opened


def test_a_job_that_left_the_queue_stands_as_its_cluster_knows(either: Desk) -> None:
    """The first is cancelled with Slurm's own command, the second with ours."""
    for name in "ab":
        held = ("launch=slurm", "launch.sbatch=[--hold]", f"run.name={name}")
        assert either.type("train", *held).code == 0
        found = standing(either, name)
        assert (found["state"], found["note"]) == ("queued", "JobHeldUser")
    either.cluster.slurm("scancel", either.job("a"))
    assert standing(either, "a")["state"] == "cancelled", "known to the queue for a minute"
    assert either.type("cancel", "b").out == f"run b: job {either.job('b')} left the queue\n"

    forgetful = either.folder / "bin"
    forgetful.mkdir()
    (forgetful / "squeue").write_text("#!/bin/sh\n")
    (forgetful / "squeue").chmod(0o755)
    path = {"PATH": f"{forgetful}:{os.environ['PATH']}"}
    known = "cancelled" if either.variables["KIND"] == "accounted" else "lost"
    until(lambda: standing(either, "a", **path)["state"] == known, 120, known)
    assert standing(either, "b", **path)["state"] == "cancelled", "by the mark in its folder"
