"""A node of a Slurm job is lost, comes back, and gets another agent in the same job."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from command_line import START_S, CommandLine
from command_runner import RunningCommand, until
from node_worlds import LONG, let_run, require_same_curve, start_by_slurm

from echelon.errors import ExitCode
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

PACE = ("missing_pause_s=0.5",)
"""While a node is missing, steps take so long that it is back before the end."""


def start_job(command_line: CommandLine, *words: str) -> tuple[RunningCommand, list[str]]:
    """Three nodes without a spare, training."""
    return start_by_slurm(command_line, "launch.nodes=3", *LONG, *PACE, *words)


def read_agent_logs(command_line: CommandLine) -> str:
    """What all agents have printed: any of them may lead."""
    files = sorted(command_line.run().logs_folder.glob("node-*.log"))
    return "\n".join(file.read_text() for file in files)


def wait_for_text(command_line: CommandLine, text: str, count: int = 1) -> None:
    """Wait until the agents have said something so often."""

    def is_said() -> bool:
        return read_agent_logs(command_line).count(text) >= count

    def describe() -> str:
        return f"{text!r}; {read_agent_logs(command_line)}\n{read_job_log(command_line)}"

    try:
        until(is_said, START_S, "")
    except AssertionError:
        raise AssertionError(describe()) from None


def read_job_log(command_line: CommandLine) -> str:
    return command_line.run().job_log_file.read_text()


def require_one_job(
    command_line: CommandLine, started: RunningCommand, clean: Run, lost: Sequence[int]
) -> None:
    """The run ends well in the job that it began with; these ranks were lost, and all came back."""
    job = command_line.job()
    let_run(command_line)
    done = started.wait(600)
    assert done.code == ExitCode.OK, f"{done.err}\n{read_agent_logs(command_line)}"
    run = command_line.run()
    assert command_line.job() == job
    assert len(run.read_status_file()["starts"]) == 1
    [phase] = read_history(run, is_running=False).phases
    assert [rank for round_ in phase.rounds for rank in round_.lost] == [*lost]
    assert phase.rounds[-1].processes == 3
    require_same_curve(run, clean)
    command_line.require_nothing_left()


@pytest.mark.parametrize("node", [2, 0])
def test_a_node_whose_agent_is_killed_gets_another(
    node: int, command_line: CommandLine, long_clean_run: Run
) -> None:
    """That of node 0 leads; the batch script runs there."""
    started, hosts = start_job(command_line)
    os.kill(command_line.agent(hosts[node]), signal.SIGKILL)
    wait_for_text(command_line, "going on with 2 processes")
    wait_for_text(command_line, f"{hosts[node]} takes over rank {node}")
    wait_for_text(command_line, f"rank {node} replaced: 3 processes")
    assert "starting agent 3 there" in read_job_log(command_line)
    require_one_job(command_line, started, long_clean_run, [node])


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_was_cut_off_joins_again(
    node: int, command_line: CommandLine, long_clean_run: Run
) -> None:
    cluster = command_line.cluster
    with cluster.patient_controller():
        started, hosts = start_job(command_line)
        cluster.link(hosts[node], "down")
        wait_for_text(command_line, "going on with 2 processes")
        cluster.link(hosts[node], "up")
        wait_for_text(command_line, f"rank {node} replaced: 3 processes")
        require_one_job(command_line, started, long_clean_run, [node])


def test_the_run_goes_on_when_all_agents_of_its_start_are_gone(
    command_line: CommandLine, long_clean_run: Run
) -> None:
    """Those that were started again lead it to its end, and srun has none left to wait for."""
    started, hosts = start_job(command_line, "launch.max_node_faults=0")
    for times, host in enumerate(hosts):
        os.kill(command_line.agent(host), signal.SIGKILL)
        wait_for_text(command_line, "replaced: 3 processes", times + 1)
    require_one_job(command_line, started, long_clean_run, [0, 1, 2])


def test_a_node_that_is_lost_twice_is_not_taken_back(
    command_line: CommandLine, long_clean_run: Run
) -> None:
    started, hosts = start_job(command_line)
    os.kill(command_line.agent(hosts[1]), signal.SIGKILL)
    wait_for_text(command_line, "rank 1 replaced: 3 processes")
    os.kill(command_line.agent(hosts[1]), signal.SIGKILL)
    wait_for_text(command_line, f"{hosts[1]} is at fault (at fault 2 times")
    let_run(command_line)
    done = started.wait(600)
    assert done.code == ExitCode.OK, done.err
    log = read_job_log(command_line)
    assert log.count(f"{hosts[1]} is lost, and still in this job") == 1, log
    require_same_curve(command_line.run(), long_clean_run)
    command_line.require_nothing_left()


def test_a_node_that_slurm_has_taken_out_does_not_come_back(
    command_line: CommandLine, long_clean_run: Run
) -> None:
    started, hosts = start_job(command_line)
    command_line.cluster.kill_node(hosts[2])
    out = f"{hosts[2]} does not come back: Slurm has taken it out of this job"
    until(lambda: out in read_job_log(command_line), START_S, "it is said")
    assert "`echelon scale a nodes=N` gets another node" in read_job_log(command_line)
    command_line.cluster.slurm("scontrol", "ping")
    let_run(command_line)
    done = started.wait(600)
    assert done.code == ExitCode.OK, done.err
    require_same_curve(command_line.run(), long_clean_run)
