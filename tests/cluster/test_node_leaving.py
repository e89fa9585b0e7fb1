"""Nodes leave a run on purpose: the others go on, and nothing counts as a fault."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from command_line import START_S, CommandLine
from command_runner import until
from node_worlds import (
    require_same_curve,
    run_undisturbed,
    start_by_slurm,
    start_by_ssh,
    start_world,
    wait_for_ends,
)

from echelon.errors import ExitCode
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_undisturbed(tmp_path_factory.mktemp("clean"))


def require_no_fault(run: Run, left: list[int]) -> None:
    """These ranks left, in this order; no rank was lost and no step made again."""
    [phase] = read_history(run, is_running=False).phases
    assert [rank for round_ in phase.rounds for rank in round_.left] == left
    assert [rank for round_ in phase.rounds for rank in round_.lost] == []
    assert phase.redone_steps == 0


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_is_given_notice_leaves_and_the_others_go_on(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    """Node 0 leads, and has rank 0 with its files."""
    world = start_world(command_line)
    host = command_line.cluster.nodes[node]
    os.kill(command_line.agent(host), signal.SIGTERM)
    began = time.monotonic()
    until(lambda: world[node].process.poll() is not None, START_S, command_line.recent_output())
    print(f"notice to node {node} → it has left: {time.monotonic() - began:.2f} s")
    codes = wait_for_ends(world)
    assert codes.pop(node) == ExitCode.LEFT, command_line.recent_output()
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    left = f"node {node} ({host}, rank {node}): it was sent SIGTERM"
    assert f"left: {left}; going on with 2 processes" in command_line.recent_output()
    run = command_line.run()
    require_same_curve(run, clean_run)
    require_no_fault(run, [node])
    shown = command_line.type("show", "a")
    assert left in " ".join(shown.out.split())
    assert "at fault" not in shown.out
    told = json.loads(command_line.type("show", "a", "--json").out)
    assert told["accounting"]["lost_ranks"] == 0
    assert [r["left_ranks"] for r in told["accounting"]["rounds"]] == [[node]]
    command_line.require_nothing_left()


def test_a_spare_takes_over_from_a_node_that_leaves(
    command_line: CommandLine, clean_run: Run
) -> None:
    world = start_world(command_line, "launch.spares=1")
    hosts = command_line.cluster.nodes
    os.kill(command_line.agent(hosts[0]), signal.SIGUSR2)
    assert wait_for_ends(world) == [ExitCode.LEFT, ExitCode.OK, ExitCode.OK]
    assert f"{hosts[2]} takes over rank 0" in command_line.recent_output()
    assert "rank 0 replaced: 2 processes" in command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    require_no_fault(command_line.run(), [0])
    command_line.require_nothing_left()


def test_a_stop_signal_to_all_nodes_saves_and_ends_the_run(command_line: CommandLine) -> None:
    world = start_world(command_line)
    for agent in [command_line.agent(host) for host in command_line.cluster.nodes]:
        os.kill(agent, signal.SIGTERM)
    assert wait_for_ends(world) == [ExitCode.PREEMPTED] * 3, command_line.recent_output()
    run = command_line.run()
    assert run.read_status_file()["state"] == "preempted"
    assert run.find_newest_step() == command_line.step()  # saved where it ended
    require_no_fault(run, [])
    command_line.require_nothing_left()


def test_a_person_who_types_ctrl_c_at_one_node_stops_all(command_line: CommandLine) -> None:
    world = start_world(command_line)
    os.kill(command_line.agent(command_line.cluster.nodes[1]), signal.SIGINT)
    assert wait_for_ends(world) == [ExitCode.PREEMPTED] * 3, command_line.recent_output()
    command_line.require_nothing_left()


def test_below_min_nodes_a_notice_stops_all(command_line: CommandLine) -> None:
    world = start_world(command_line, "launch.min_nodes=3")
    os.kill(command_line.agent(command_line.cluster.nodes[2]), signal.SIGTERM)
    assert wait_for_ends(world) == [ExitCode.PREEMPTED] * 3, command_line.recent_output()
    assert "2 nodes would be left, and launch.min_nodes=3" in world[0].read_output()
    command_line.require_nothing_left()


def test_a_notice_to_one_host_by_ssh_and_a_stop_of_the_launcher(command_line: CommandLine) -> None:
    started = start_by_ssh(command_line, "trainer.steps=100000")
    host = command_line.cluster.nodes[0]
    os.kill(command_line.agent(host), signal.SIGTERM)
    left = f"left: node 0 ({host}, rank 0): it was sent SIGTERM"
    until(lambda: left in started.read_output(), START_S, started.read_output())
    until(lambda: not command_line.left(host), START_S, "it is gone")
    command_line.wait_for_more()
    assert started.process.poll() is None
    os.kill(started.process.pid, signal.SIGTERM)
    done = started.wait()
    assert done.code == ExitCode.PREEMPTED, done.err
    assert command_line.run().read_status_file()["state"] == "preempted"
    command_line.require_nothing_left()


def test_a_notice_to_one_node_of_a_job_and_a_cancelled_job(command_line: CommandLine) -> None:
    started, hosts = start_by_slurm(command_line, "launch.nodes=3", "trainer.steps=100000")
    os.kill(command_line.agent(hosts[1]), signal.SIGTERM)
    log = command_line.run().get_node_log_file(0)
    left = f"left: node 1 ({hosts[1]}, rank 1): it was sent SIGTERM"
    until(lambda: left in log.read_text(), START_S, log.read_text())
    until(lambda: not command_line.left(hosts[1]), START_S, "it is gone")
    command_line.wait_for_more()
    assert command_line.type("cancel", "a").code == ExitCode.OK
    started.wait()
    run = command_line.run()
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "it is saved")
    assert run.find_newest_step() == command_line.step()
    command_line.require_nothing_left()
