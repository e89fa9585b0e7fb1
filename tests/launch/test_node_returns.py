"""Agents are started again on lost nodes of a Slurm job, but not for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from command_runner import until
from run_folders import make_run

from echelon.launch.node.host_lock import lock_host
from echelon.launch.node.membership import Member, Membership
from echelon.launch.plan import NodeReport
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.launch.slurm.node_returns import MAX_TRIES, NodeReturns
from echelon.runs.run_folder import Run
from echelon.world.network_key import KEY_VARIABLE, make_key

LIMIT_S = 120.0
HOSTS = ["a", "b", "c"]
FAILS = ("import sys; sys.exit(1)",)
WAITS = ("import time; time.sleep(1000)",)


class Steps:
    """Instead of srun: processes that fail or wait, as they are told."""

    def __init__(self, program: Sequence[str]) -> None:
        self.program = program
        self.started: list[tuple[str, int, str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, node: int, master: str) -> subprocess.Popen[bytes]:
        self.started.append((host, node, master))
        self.processes.append(subprocess.Popen([sys.executable, "-c", *self.program]))
        return self.processes[-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, "a")


def report(run: Run, nodes: list[int], *returning: tuple[int, int]) -> None:
    """What the leader writes."""
    SlurmLauncher().record_nodes(run, NodeReport(nodes, [], 0, [*returning], "a:1"))


@contextmanager
def returning_nodes(
    run: Run, steps: Steps, list_hosts: Callable[[], Sequence[str]] = lambda: HOSTS
) -> Iterator[NodeReturns]:
    """Runs in a thread until the context ends."""
    returns = NodeReturns(run, HOSTS, steps.start, list_hosts, first_wait_s=0.001, poll_s=0.01)
    thread = threading.Thread(target=returns.run_until_over)
    thread.start()
    try:
        yield returns
    finally:
        for process in steps.processes:
            process.kill()
        returns.stop()
        thread.join()


def test_a_node_whose_agents_fail_is_given_up(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    steps, text = Steps(FAILS), ""
    report(run, [0, 1], (2, 3))
    with returning_nodes(run, steps):
        given_up = f"c does not come back: an agent was started there {MAX_TRIES} times in vain"

        def is_given_up() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return given_up in text

        until(is_given_up, LIMIT_S, "it is given up")
    assert steps.started == [("c", 3, "a:1")] * MAX_TRIES
    assert "`echelon scale a nodes=N` gets another node" in text


def test_a_node_that_is_lost_again_is_started_under_its_next_number(run: Run) -> None:
    steps = Steps(WAITS)
    report(run, [0, 1], (2, 3))
    with returning_nodes(run, steps):
        until(lambda: len(steps.processes) == 1, LIMIT_S, "the first agent")
        report(run, [0, 1, 3])
        report(run, [0, 1], (3, 5))  # its srun has not noticed
        until(lambda: len(steps.processes) == 2, LIMIT_S, "the second agent")
        assert steps.processes[0].poll() is not None
    assert [node for _, node, _ in steps.started] == [3, 5]


def test_a_node_that_slurm_has_taken_out_gets_no_agent(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(WAITS)
    report(run, [0, 1], (2, 3), (1, 4), (17, 18))  # the last one is of a further job
    with returning_nodes(run, steps, lambda: ["a", "b"]):
        until(lambda: bool(steps.processes), LIMIT_S, "the agent of the other one")
    assert steps.started == [("b", 4, "a:1")]
    assert "c does not come back: Slurm has taken it out of this job" in capfd.readouterr().err


def test_agents_that_take_part_are_waited_for_and_others_are_not(run: Run) -> None:
    steps = Steps(WAITS)
    report(run, [0], (1, 3), (2, 4))
    with returning_nodes(run, steps) as returns:
        until(lambda: len(steps.processes) == 2, LIMIT_S, "both agents")
        by_number = {
            node: process
            for (_, node, _), process in zip(steps.started, steps.processes, strict=True)
        }
        report(run, [0, 3], (2, 4))
        returns.stop()
        by_number[3].kill()
        until(lambda: by_number[4].poll() is not None, LIMIT_S, "the one that takes no part ends")


def test_agents_that_are_left_alone_are_joined_by_further_ones(run: Run) -> None:
    steps = Steps(WAITS)
    report(run, [0], (1, 3))
    with returning_nodes(run, steps) as returns:
        until(lambda: len(steps.processes) == 1, LIMIT_S, "the first agent")
        report(run, [0, 3])
        returns.end_without_agents()
        report(run, [3], (0, 4))
        until(lambda: len(steps.processes) == 2, LIMIT_S, "an agent of the other node")


def test_when_the_run_is_over_or_cancelled_no_agent_is_started(run: Run) -> None:
    steps = Steps(WAITS)
    run.agent_exit_file.write_text("0\n")
    report(run, [0, 1], (2, 3))
    returns = NodeReturns(run, HOSTS, steps.start, lambda: HOSTS, first_wait_s=0.0)
    returns.run_until_over()
    assert steps.started == []


# --- what the leader says ---


def make_membership() -> Membership:
    members = [Member(n, HOSTS[n], place=n, slots=(n,)) for n in range(3)]
    return Membership(0, 0, {m.node: m for m in members}, can_lose_nodes=True)


def test_a_lost_node_comes_back_under_a_number_that_no_other_has() -> None:
    lost = make_membership().remove(2)
    assert [tuple(each) for each in lost.list_returning_nodes()] == [(2, "c", 3)]
    assert lost.reserve_nodes(1)[1] == 4
    assert Membership.from_fields(lost.to_fields()) == lost
    back = lost.add(Member(3, "c"))
    assert back.list_returning_nodes() == []
    again = back.remove(3)
    assert [tuple(each) for each in again.list_returning_nodes()] == [(3, "c", 4)]


@pytest.mark.parametrize("what", ["left on purpose", "left out", "not wanted", "of a further job"])
def test_a_node_that_is_not_wanted_does_not_come_back(what: str) -> None:
    known = make_membership()
    if what == "left on purpose":
        known = known.add(replace(known.members[2], leaving="asked to"))
    if what == "of a further job":
        known = known.add(replace(known.members[2], is_added=True))
    known = known.remove(2)
    if what == "left out":
        known = replace(known, excluded_hosts=("c",))
    if what == "not wanted":
        known = replace(known, wanted_nodes=2)
    assert known.list_returning_nodes() == []


# --- one agent per host ---


def test_an_agent_waits_until_all_processes_of_the_lost_one_have_ended() -> None:
    env = {KEY_VARIABLE: make_key()}
    first = lock_host(env, 0.0)
    assert first is not None
    assert lock_host(env, 0.0) is None
    with pytest.raises(Exception, match="has not ended within"):
        lock_host(env, 0.5)
    worker = os.fork()
    if worker == 0:
        signal.pause()
    first.close()  # the agent
    assert lock_host(env, 0.0) is None
    os.kill(worker, 9)
    os.waitpid(worker, 0)
    again = lock_host(env, LIMIT_S)
    assert again is not None
    other = lock_host({KEY_VARIABLE: make_key()}, 0.0)
    assert other is not None
    again.close()
    other.close()
