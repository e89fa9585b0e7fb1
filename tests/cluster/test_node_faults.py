"""What breaks on one machine of several is noticed, named by all, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from command_line import FAULTY, START_S, CommandLine, curve
from command_runner import CommandResult, RunningCommand, free_port, until
from slurm_cluster import EMPTY_S

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

AT_ONCE_S = 2.0 + 3.0
"""A dead worker or agent is noticed in two seconds; the rest is for a machine with two cores."""
CUT_OFF_S = 20.0 + 5.0
"""The same of a node that is cut off."""
WORLD = (
    FAULTY,
    "run.name=a",
    "pause_s=0.02",
    "trainer.batch_size=8",
    "trainer.steps=1000000",
    "trainer.save.epochs=null",
    "trainer.save.steps=10",
    "trainer.evaluate.epochs=null",
    "trainer.log_steps=1",
)
ENDS = "launch.max_replacements=0"


def _start(command_line: CommandLine, *words: str) -> list[RunningCommand]:
    """Node 0 and node 1, training."""
    world = command_line.env_world("train", "launch=env", *WORLD, *words, port=free_port())
    command_line.wait_for_step(15)
    return world


def _notice(what: str, seen: Callable[[], object], limit_s: float) -> None:
    """`pytest -s` shows the figure beside its limit, which a busy machine may exceed."""
    began = time.monotonic()
    until(seen, START_S, f"{what} is noticed")
    print(f"{what}: noticed in {time.monotonic() - began:.1f} s, of {limit_s:g}")


# --- what the other ranks survive ---


def test_ranks_of_any_node_are_replaced_while_the_others_go_on(command_line: CommandLine) -> None:
    node_0, node_1, _ = command_line.cluster.nodes
    world = _start(command_line, "launch.hang_s=3")
    first = world[0]
    os.kill(command_line.worker(node_1), signal.SIGKILL)
    replaced = "rank 1 replaced: 2 processes"
    _notice("a killed rank", lambda: replaced in first.read_output(), AT_ONCE_S)
    assert f"lost rank 1 on {node_1} after step " in first.read_output()
    assert "killed by SIGKILL; going on with 1 process\n" in first.read_output()

    command_line.wait_for_more()
    os.kill(command_line.worker(node_1), signal.SIGSTOP)
    seen = first.read_output
    _notice("a stopped rank", lambda: seen().count(replaced) == 2, 3 + AT_ONCE_S)
    assert seen().count(f"lost rank 1 on {node_1} after step ") == 2, seen()

    command_line.wait_for_more()
    os.kill(command_line.worker(node_0), signal.SIGKILL)
    back = "rank 0 replaced: 2 processes"
    _notice("a killed rank 0", lambda: back in seen(), AT_ONCE_S)
    command_line.wait_for_more()
    steps = [step for step, _ in curve(command_line.run())]
    assert steps == list(range(1, len(steps) + 1))
    assert "starting again" not in seen()
    for node in world:
        node.process.send_signal(signal.SIGTERM)
    assert [done.code for done in _ended(world)] == [ExitCode.PREEMPTED] * 2
    command_line.require_nothing_left()


# --- what a restart mends ---


def test_a_rank_that_loops_dies_or_stops_is_named_and_all_nodes_start_again(
    command_line: CommandLine,
) -> None:
    node_0, node_1, _ = command_line.cluster.nodes
    once = f"once={command_line.folder / 'once'}"
    loop = ("fault=loop", "on=1", "at=40", once, "launch.hang_s=2", "launch.max_restarts=3")
    world = _start(command_line, *loop, "launch.max_replacements=0")
    first = world[0]

    until(lambda: "3 restart(s) left" in first.read_output(), START_S, "the loop is noticed")
    told = first.read_output()
    assert "no progress for 2 s (launch.hang_s=2), and every other rank waits for it" in told
    assert f"rank 1 on {node_1} failed after step 39" in told
    where = told.partition("Where rank 1 stands:")[2].partition("rank 1 on")[0]
    assert "in _loop" in where
    [report] = command_line.run().list_hang_reports()
    assert f"The stacks of all ranks are in {report}\n" in where
    stacks = report.read_text()
    assert f"run a: 2 ranks on {node_0}, {node_1}" in stacks
    assert "rank 1 is not in all_reduce #" in stacks

    command_line.wait_for_more()
    os.kill(command_line.worker(node_1), signal.SIGKILL)
    _notice("a killed rank", lambda: "2 restart(s) left" in first.read_output(), AT_ONCE_S)
    assert f"rank 1 on {node_1} failed" in first.read_output().rpartition("The kernel kills")[2]
    assert "killed by SIGKILL" in first.read_output().rpartition("The kernel kills")[2]

    command_line.wait_for_more()
    stopped = command_line.worker(node_1)
    os.kill(stopped, signal.SIGSTOP)
    _notice("a stopped rank", lambda: "1 restart(s) left" in first.read_output(), 2 + AT_ONCE_S)
    last = first.read_output().rpartition("killed by SIGKILL")[2]
    assert f"Process {stopped} is stopped (SIGSTOP)" in last
    assert f"rank 1 on {node_1} failed" in last

    # With no restart left, the next one ends it, on both nodes.
    command_line.wait_for_more()
    os.kill(command_line.worker(node_0), signal.SIGSEGV)
    for done in _ended(world):
        assert done.code == ExitCode.FAILED
        assert f"rank 0 on {node_0} failed" in done.err.rstrip().splitlines()[-1]
    assert command_line.run().read_status_file()["failure"]["summary"] == "killed by SIGSEGV"
    command_line.require_nothing_left()


def _ended(world: list[RunningCommand], limit_s: float = START_S) -> list[CommandResult]:
    until(lambda: all(node.process.poll() is not None for node in world), limit_s, "all ended")
    return [node.wait() for node in world]


# --- what ends the world, where lost ranks are not replaced (see test_node_survival.py) ---


def test_a_link_that_comes_back_soon_costs_nothing_and_a_killed_agent_is_named_at_once(
    command_line: CommandLine,
) -> None:
    node_1 = command_line.cluster.nodes[1]
    world = _start(command_line, "launch.max_restarts=1", ENDS)
    command_line.cluster.link(node_1, "down")
    time.sleep(2)  # a hundred steps
    assert all(node.process.poll() is None for node in world)
    command_line.cluster.link(node_1, "up")
    command_line.wait_for_more()
    assert "failed" not in command_line.output()

    os.kill(command_line.agent(node_1), signal.SIGKILL)
    _notice("a killed agent", world[0].process.poll, AT_ONCE_S)
    done = world[0].wait()
    assert done.code == ExitCode.NODE_LOST
    assert f"node 1 ({node_1}, rank 1) closed its connection" in done.err
    failure = command_line.run().read_status_file()["failure"]
    assert (failure["rank"], failure["host"]) == (1, node_1)
    assert world[1].wait().code == -signal.SIGKILL
    command_line.require_nothing_left()


def test_a_killed_node_0_is_named_by_the_others(command_line: CommandLine) -> None:
    node_0 = command_line.cluster.nodes[0]
    world = _start(command_line, ENDS)
    os.kill(command_line.agent(node_0), signal.SIGKILL)
    _notice("a killed node 0", world[1].process.poll, AT_ONCE_S)
    done = world[1].wait()
    assert done.code == ExitCode.NODE_LOST
    assert f"node 0 ({node_0}, rank 0) closed its connection" in done.err
    assert command_line.run().read_status_file()["state"] == "failed"
    assert command_line.run().read_status_file()["failure"]["host"] == node_0
    command_line.require_nothing_left()


def test_a_node_that_is_cut_off_is_named_by_both_sides(command_line: CommandLine) -> None:
    node_0, node_1, _ = command_line.cluster.nodes
    world = _start(command_line, ENDS)
    command_line.cluster.link(node_1, "down")
    _notice("a node that is cut off", world[0].process.poll, CUT_OFF_S)
    command_line.require_nothing_left(node_0)
    until(world[1].process.poll, START_S, "the node that is cut off ends too")
    command_line.require_nothing_left()
    here, there = world[0].wait(), world[1].wait()
    assert (here.code, there.code) == (ExitCode.NODE_LOST, ExitCode.NODE_LOST)
    assert f"node 1 ({node_1}, rank 1) has sent nothing for 14 s" in here.err
    assert f"node 0 ({node_0}, rank 0) has sent nothing for 14 s" in there.err


# --- under Slurm ---


def test_a_job_outlives_a_killed_rank_the_controller_and_a_killed_node(
    command_line: CommandLine,
) -> None:
    more = ["launch.nodes=2", "launch.procs=1", "launch.max_restarts=2"]
    more += ["launch.max_replacements=0"]
    following = command_line.start("train", "launch=slurm", *more, *WORLD, "--wait")
    command_line.wait_for_step(15)
    job = command_line.job()
    node_0, node_1 = command_line.hosts(job)
    os.kill(command_line.worker(node_1), signal.SIGKILL)
    log = command_line.run().get_node_log_file(0)
    _notice("a killed rank", lambda: "2 restart(s) left" in log.read_text(), AT_ONCE_S)
    assert f"rank 1 on {node_1} failed" in log.read_text()

    command_line.wait_for_more()
    command_line.cluster.restart_controller()
    command_line.wait_for_more()

    command_line.cluster.kill_node(node_1)
    lost = f"node 1 ({node_1}, rank 1) closed its connection"
    _notice("a killed node", lambda: lost in log.read_text(), CUT_OFF_S)
    command_line.wait_for_more(
        limit_s=EMPTY_S
    )  # the same job, on other nodes, where the snapshot was
    assert command_line.job() == job
    assert node_1 not in command_line.hosts(job)
    steps = [step for step, _ in curve(command_line.run())]
    assert steps == sorted(set(steps))
    command_line.cluster.slurm("scancel", job)
    assert following.wait().code != ExitCode.OK
    command_line.require_nothing_left(node_0)


# --- who never comes ---


def test_a_node_that_never_comes_is_named(command_line: CommandLine) -> None:
    hosts = command_line.cluster.nodes
    words = ("train", "launch=env", *WORLD, "launch.join_timeout_s=2")
    here = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0]}
    alone = [
        command_line.start(*words, on=hosts[0], MASTER_PORT="21001", NODE_RANK="0", **here),
        command_line.start(*words, on=hosts[1], MASTER_PORT="21002", NODE_RANK="1", **here),
    ]
    first, other = (each.wait() for each in alone)
    assert (first.code, other.code) == (ExitCode.RENDEZVOUS, ExitCode.RENDEZVOUS)
    assert "after 2 s only 1 of 2 nodes are here; missing: node 1" in first.err
    assert f"node 1 found no node 0 at {hosts[0]}:21002 within 2 s" in other.err
    command_line.require_nothing_left()
