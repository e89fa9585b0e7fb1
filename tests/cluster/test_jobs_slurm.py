"""Jobs of a real Slurm as `echelon jobs`, `logs`, `stacks`, `attach` and `cancel` see and end them,
on the kind of cluster that keeps accounts and on the kind that does not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import REGRESSION, CommandLine, open_command_line
from command_runner import until

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def read_job_row(command_line: CommandLine, name: str = "a", **variables: Any) -> dict[str, Any]:
    done = command_line.type("jobs", "--json", **variables)
    assert done.code == 0, done.err
    (found,) = [job for job in json.loads(done.out) if job["run"] == name]
    return dict(found)


def test_a_job_is_followed_over_a_requeue_and_cancelled(command_line: CommandLine) -> None:
    command_line.variables["ECHELON_TEST_PAUSE_S"] = "0.05"
    words = ("launch.nodes=2", "launch.threads=1", "run.name=a", "trainer.log_steps=1")
    many = ("trainer.steps=100000", "trainer.batch_size=6", "eval_samples=0")
    waiting = command_line.start("train", "launch=slurm", "--wait", *words, *many, REGRESSION)
    command_line.job()
    follower = command_line.start("logs", "a", "-f")
    command_line.wait_for_step(3)
    found = read_job_row(command_line)
    assert (found["state"], found["job"]) == ("running", command_line.job())
    assert (found["nodes"], found["world"], found["total_steps"]) == (2, 2, 100_000)
    assert found["step"] >= 3
    stacks = command_line.type("stacks", command_line.job())
    assert stacks.out.startswith("run a: 2 ranks on "), stacks.output

    command_line.cluster.slurm("scontrol", "requeue", command_line.job())
    assert until(lambda: read_job_row(command_line)["state"] == "requeued", 300, "requeued")
    command_line.wait_for_more()
    attached = command_line.start("attach", "a")
    until(lambda: "running" in attached.read_output(), 300, "attached")
    assert "was asked to save and end" in command_line.type("cancel", "a").out
    assert attached.wait().code == waiting.wait().code == ExitCode.PREEMPTED
    assert read_job_row(command_line)["state"] == "cancelled"
    assert "nothing to cancel" in command_line.type("cancel", "a", "--now").out

    told = follower.wait()
    openings = [line for line in told.out.splitlines() if "100,000 steps" in line]
    assert (told.code, len(openings)) == (0, 2), told.out
    assert told.out.count("everything is saved") >= 1
    command_line.require_nothing_left()


def test_nobody_walks_into_the_folder_of_a_job(command_line: CommandLine) -> None:
    """Neither while it waits nor while it runs; and `jobs` does not forget it."""
    command_line.variables["ECHELON_TEST_PAUSE_S"] = "0.05"
    words = ("run.name=a", "trainer.steps=100000", "trainer.batch_size=6", "eval_samples=0")
    held = ("launch=slurm", "launch.nodes=2", "launch.threads=1", "launch.sbatch=[--hold]")
    assert command_line.type("train", *held, *words, REGRESSION).code == 0
    job = command_line.job()

    def require_refusals(*launches: str) -> None:
        for launch in launches:
            done = command_line.type("train", f"launch={launch}", *words, REGRESSION)
            assert done.code == ExitCode.USAGE, done.err
            assert "run a is " in done.err
            assert " already, as " in done.err
        assert read_job_row(command_line)["job"] == job

    require_refusals("inline", "local", "slurm")
    assert read_job_row(command_line)["state"] == "queued"
    command_line.cluster.slurm("scontrol", "release", job)
    command_line.wait_for_step(3)
    require_refusals("inline")
    assert read_job_row(command_line)["state"] == "running"
    done = command_line.type("rm", "--yes", "a")
    assert done.code == ExitCode.USAGE
    assert "run a is " in done.err
    assert "was asked to save and end" in command_line.type("cancel", "a").out
    until(lambda: read_job_row(command_line)["state"] == "cancelled", 300, "cancelled")
    assert "run a was not running: it is cancelled" in command_line.type("cancel", "a").out
    command_line.require_nothing_left()


@pytest.fixture(params=["cluster", "accounted"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CommandLine]:
    with open_command_line(request.getfixturevalue(request.param), tmp_path) as opened:
        opened.variables["KIND"] = request.param
        yield opened


def test_a_job_that_left_the_queue_stands_as_its_cluster_knows(either: CommandLine) -> None:
    """The first is cancelled with Slurm's own command, the second with ours."""
    for name in "ab":
        held = ("launch=slurm", "launch.sbatch=[--hold]", f"run.name={name}")
        assert either.type("train", *held).code == 0
        found = read_job_row(either, name)
        assert (found["state"], found["note"]) == ("queued", "JobHeldUser")
    either.cluster.slurm("scancel", either.job("a"))
    assert read_job_row(either, "a")["state"] == "cancelled", "known to the queue for a minute"
    assert either.type("cancel", "b").out == f"run b: job {either.job('b')} left the queue\n"

    forgetful = either.folder / "bin"
    forgetful.mkdir()
    (forgetful / "squeue").write_text("#!/bin/sh\n")
    (forgetful / "squeue").chmod(0o755)
    path = {"PATH": f"{forgetful}:{os.environ['PATH']}"}
    known = "cancelled" if either.variables["KIND"] == "accounted" else "lost"
    until(lambda: read_job_row(either, "a", **path)["state"] == known, 120, known)
    assert read_job_row(either, "b", **path)["state"] == "cancelled", "by the mark in its folder"
