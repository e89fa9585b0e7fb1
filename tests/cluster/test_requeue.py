"""A run over several jobs: out of time, preempted, cancelled; and the run is as one of one job."""

from __future__ import annotations

import pytest
from command_line import REGRESSION, START_S, CommandLine, curve, evaluations
from command_runner import until

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

STEPS = 300
NUMBERS = (
    REGRESSION,
    "trainer.batch_size=6",
    f"trainer.steps={STEPS}",
    "trainer.save.epochs=null",
    "trainer.evaluate.epochs=null",
    "trainer.evaluate.steps=100",
    "trainer.log_steps=1",
    "eval_samples=9",
    "dropout=0.2",
    "optimizer=adam",
    "launch.threads=1",
)
SLURM = ("launch=slurm", "launch.nodes=2", "launch.procs=1")
CONTAINER = "launch.setup=['srun() { command srun --export=ALL,PATH=/nowhere \"$@\"; }']"
"""What the agents see has no Slurm in it, and nothing else."""
QUEUES_S = 300.0
"""Slurm starts a requeued job after ten seconds or more, on our cluster."""


def test_one_run_over_three_jobs(command_line: CommandLine) -> None:
    command_line.variables = {
        "ECHELON_TEST_FAULT": "1:20:hear"
    }  # twenty steps a job, and then a signal
    words = (*SLURM, *NUMBERS, CONTAINER, "launch.partition=spare", "run.name=a", "--wait")
    following = command_line.start("train", *words)
    command_line.wait_for_step(5)
    job, run = command_line.job(), command_line.run()

    # USR2, as Slurm sends it before the end of the time: the script requeues.
    command_line.cluster.slurm("scancel", "--signal=USR2", job)
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "saved")
    saved = run.read_status_file()["step"]
    assert run.find_newest_step() == saved
    said = f"stopped by SIGUSR2 after step {saved}"  # after the status, so it may still come
    until(lambda: said in run.get_rank_log_file(0).read_text(), START_S, said)
    command_line.cluster.wait_for_job(job, "PENDING")
    _goes_on(command_line, saved)
    assert command_line.job() == job

    # Somebody more important: Slurm sends TERM and requeues.
    other = ("-N3", "--exclusive", "-p", "high", "-o", "/dev/null", "--parsable", "--wrap", "true")
    command_line.cluster.slurm("sbatch", *other, cwd=command_line.folder)
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "saved again")
    assert run.find_newest_step() == run.read_status_file()["step"] > saved
    saved = run.find_newest_step()
    _goes_on(command_line, saved)
    assert [start["after"] for start in run.read_status_file()["starts"]] == [
        "",
        "preempted",
        "preempted",
    ]
    assert [start["step"] for start in run.read_status_file()["starts"]][-1] == saved

    # Cancelled is cancelled: saved, and not queued again.
    command_line.cluster.slurm("scancel", job)
    done = following.wait()
    assert done.code != ExitCode.OK
    command_line.cluster.wait_for_job(job, "CANCELLED")
    assert run.read_status_file()["state"] == "preempted"
    assert run.find_newest_step() == command_line.step() > saved
    assert run.get_rank_log_file(0).read_text().count("resuming run a after step") == 2
    command_line.require_nothing_left()

    # Here it goes on to the end, and nobody sees what happened to it.
    command_line.variables = {}
    local = ("launch=local", "launch.procs=2", *NUMBERS)
    for name in ("a", "whole"):
        assert command_line.type("train", *local, f"run.name={name}").code == ExitCode.OK
    assert curve(run) == curve(command_line.run("whole"))
    assert evaluations(run) == evaluations(command_line.run("whole"))


def _goes_on(command_line: CommandLine, saved: int) -> None:
    """After that step, with the log of before."""
    log = command_line.run().get_rank_log_file(0)
    said = f"resuming run a after step {saved}"
    until(lambda: said in log.read_text(), QUEUES_S, said)
    assert log.read_text().startswith("run a: ")
    command_line.wait_for_step(saved + 3)


def test_a_run_that_gets_no_further_is_not_queued_for_ever(command_line: CommandLine) -> None:
    """Three jobs in a row from one step; two of them only stand in its status."""
    held = (*SLURM, *NUMBERS, "launch.sbatch=['--hold']", "run.name=a", "--wait")
    following = command_line.start("train", *held)
    job, run = command_line.job(), command_line.run()
    before = [{"after": why, "step": 0, "time": 0.0} for why in ("", "preempted")]
    run.update_status(state="preempted", starts=before)
    command_line.cluster.slurm("scontrol", "release", job)
    done = following.wait()
    assert done.code == ExitCode.FAILED
    assert "run a was started 3 times in a row from step 0 and got no further" in done.out
    assert "hint: save more often (trainer.save.minutes=5)" in done.out
    assert "Traceback" not in done.out
    assert run.read_status_file()["state"] == "failed"
    command_line.cluster.wait_for_job(job, "FAILED")
    command_line.require_nothing_left()


@pytest.mark.campaign
def test_the_time_limit_is_heeded(command_line: CommandLine) -> None:
    """Slurm counts in minutes, and sends the signal up to one of them early."""
    command_line.variables = {"ECHELON_TEST_PAUSE_S": "0.5"}
    limits = ("launch.time='0:02:00'", "launch.signal_lead_s=30", "run.name=a")
    started = command_line.start("train", *SLURM, *NUMBERS, *limits, "--wait")
    done = started.wait(600)
    assert done.code == ExitCode.OK, done.err
    log = command_line.run().get_rank_log_file(0).read_text()
    assert log.count("stopped by SIGUSR2") == log.count("resuming run a after step ") >= 1
    assert len(command_line.run().read_status_file()["starts"]) >= 2
    assert [step for step, _ in curve(command_line.run())] == list(range(1, STEPS + 1))
