"""A node is lost, and the run goes on inside the job with the numbers of an undisturbed one."""

from __future__ import annotations

import os
import signal
import time

import pytest
from command_line import START_S, CommandLine
from command_runner import until
from node_worlds import (
    let_run,
    require_same_curve,
    start_by_slurm,
    start_by_ssh,
    start_world,
    wait_for_ends,
    wait_for_text,
)

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def measure_next_step(command_line: CommandLine, what: str) -> None:
    """Wait for the next step; `pytest -s` shows how long that took."""
    began, step = time.monotonic(), command_line.step()
    command_line.wait_for_step(step + 1)
    print(f"{what} → next step: {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("node", [1, 0])
def test_a_killed_node_is_survived_by_the_others(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    world = start_world(command_line)
    host = command_line.cluster.nodes[node]
    os.kill(command_line.agent(host), signal.SIGKILL)
    measure_next_step(command_line, f"node {node} killed")
    let_run(command_line)
    codes = wait_for_ends(world)
    assert codes.pop(node) == -signal.SIGKILL
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    assert f": node {node} ({host}, rank {node}) closed its connection" in command_line.output()
    assert "going on with 2 processes" in command_line.output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


@pytest.mark.parametrize("node", [1, 0])
def test_a_node_that_is_cut_off_ends_itself_and_the_others_go_on(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    """Nobody closes a connection. Both sides see the same folder, which is worse than in life."""
    world = start_world(command_line)
    host = command_line.cluster.nodes[node]
    command_line.cluster.link(host, "down")
    measure_next_step(command_line, f"node {node} cut off")
    let_run(command_line)
    codes = wait_for_ends(world)
    assert codes.pop(node) == ExitCode.NODE_LOST
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    others = [w.read_output() for w in world]
    alone = others.pop(node)
    assert "nodes are no majority, so this side ends" in alone
    assert any(f": node {node} ({host}, rank {node}) has sent nothing for 8 s" in o for o in others)
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


@pytest.mark.parametrize("node", [1, 0])
def test_a_spare_takes_the_place_of_a_lost_node(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    """Two nodes train, with a majority that the spare makes complete where node 0 is lost."""
    world = start_world(command_line, "launch.spares=1")
    hosts = command_line.cluster.nodes
    os.kill(command_line.agent(hosts[node]), signal.SIGKILL)
    began = time.monotonic()
    back = f"rank {node} replaced: 2 processes"
    until(lambda: back in command_line.output(), START_S, "all are back")
    print(f"node {node} of 2 killed, with a spare → full world: {time.monotonic() - began:.2f} s")
    assert f"{hosts[2]} takes over rank {node}" in command_line.output()
    let_run(command_line)
    codes = wait_for_ends(world)
    assert codes.pop(node) == -signal.SIGKILL
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_a_spare_runs_all_ranks_of_a_lost_node(command_line: CommandLine, clean_run: Run) -> None:
    world = start_world(command_line, "launch.spares=1", "launch.procs=2")
    hosts = command_line.cluster.nodes
    os.kill(command_line.agent(hosts[1]), signal.SIGKILL)
    wait_for_text(command_line, "replaced: 4 processes")
    assert wait_for_ends(world) == [ExitCode.OK, -signal.SIGKILL, ExitCode.OK]
    told = world[0].read_output()
    assert f"{hosts[2]} takes over ranks 2, 3" in told
    assert "replaced: 4 processes" in told
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_a_spare_that_is_not_needed_ends_with_the_run(
    command_line: CommandLine, clean_run: Run
) -> None:
    world = start_world(command_line, "launch.spares=1", "pause_s=0")
    assert wait_for_ends(world) == [ExitCode.OK] * 3
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_a_spare_that_is_ready_in_the_last_step_ends_with_the_run(
    command_line: CommandLine,
) -> None:
    """The round that would take it in is announced, but the others end before it begins."""
    words = ("launch.spares=1", "trainer.steps=14", "pause_s=1.5", "missing_pause_s=60")
    world = start_world(command_line, *words)
    agent = command_line.agent(command_line.cluster.nodes[1])
    command_line.wait_for_step(13)
    os.kill(agent, signal.SIGKILL)
    wait_for_text(command_line, "rank 1 replaced: 2 processes")
    codes = wait_for_ends(world)
    assert codes == [ExitCode.OK, -signal.SIGKILL, ExitCode.OK], command_line.recent_output()
    command_line.require_nothing_left()


def test_below_min_nodes_the_run_is_saved_and_ends_as_preempted(command_line: CommandLine) -> None:
    world = start_world(command_line, "launch.min_nodes=3")
    os.kill(command_line.agent(command_line.cluster.nodes[2]), signal.SIGKILL)
    codes = wait_for_ends(world)
    assert codes[:2] == [ExitCode.PREEMPTED] * 2, command_line.recent_output()
    assert "2 nodes are left, and launch.min_nodes=3" in world[0].read_output()
    run = command_line.run()
    assert run.read_status_file()["state"] == "preempted"
    assert run.find_newest_step() == command_line.step()  # saved where it ended
    command_line.require_nothing_left()


def test_of_two_nodes_only_the_side_of_the_leader_goes_on(
    command_line: CommandLine, clean_run: Run
) -> None:
    world = start_world(command_line, nodes=2)
    command_line.cluster.link(command_line.cluster.nodes[1], "down")
    wait_for_text(command_line, "going on with 1 process")
    assert wait_for_ends(world) == [ExitCode.OK, ExitCode.NODE_LOST], command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_without_node_0_one_of_two_nodes_ends(command_line: CommandLine) -> None:
    """It cannot know whether node 0 goes on. Since that does not, the run has failed."""
    world = start_world(command_line, nodes=2)
    os.kill(command_line.agent(command_line.cluster.nodes[0]), signal.SIGKILL)
    assert wait_for_ends(world)[1] == ExitCode.NODE_LOST
    failure = command_line.run().read_status_file()["failure"]
    assert failure["exit"] == ExitCode.NODE_LOST
    assert command_line.run().read_status_file()["state"] == "failed"
    command_line.require_nothing_left()


# --- by ssh and by Slurm ---


@pytest.mark.parametrize(("node", "how"), [(0, "killed"), (1, "cut off")])
def test_a_lost_host_is_survived_by_ssh(
    node: int, how: str, command_line: CommandLine, clean_run: Run
) -> None:
    """It is not tried again in vain: the run ends before the host is back."""
    started = start_by_ssh(command_line, "missing_pause_s=0.05")
    host = command_line.cluster.nodes[node]
    if how == "killed":
        os.kill(command_line.agent(host), signal.SIGKILL)
    else:
        command_line.cluster.link(host, "down")
    measure_next_step(command_line, f"by ssh, node {node} {how}")
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    assert f": node {node} ({host}, rank {node})" in done.err
    assert done.err.count("lost a node") == 1, done.err
    require_same_curve(command_line.run(), clean_run)
    command_line.cluster.link(host, "up")
    command_line.require_nothing_left()


@pytest.mark.parametrize("node", [0, 2])
def test_a_host_that_comes_back_joins_again_by_ssh(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    started = start_by_ssh(command_line, "missing_pause_s=0.3")
    host = command_line.cluster.nodes[node]
    os.kill(command_line.agent(host), signal.SIGKILL)
    began = time.monotonic()
    back = f"rank {node} replaced: 3 processes"
    is_over = started.process.poll
    until(lambda: back in started.read_output() or is_over() is not None, START_S, "it is back")
    print(f"by ssh, agent of node {node} killed → full world: {time.monotonic() - began:.1f} s")
    assert f"{host} takes over rank {node}" in started.read_output(), started.read_output()
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_a_killed_node_is_replaced_by_a_spare_of_the_job(
    command_line: CommandLine, clean_run: Run
) -> None:
    started, hosts = start_by_slurm(command_line, "launch.nodes=2", "launch.spares=1")
    job = command_line.job()
    command_line.cluster.kill_node(hosts[1])
    measure_next_step(command_line, "by Slurm, node 1 killed")
    log = command_line.run().get_node_log_file(0)
    back = "rank 1 replaced: 2 processes"
    until(lambda: back in log.read_text(), START_S, "the spare has joined", log.read_text)
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    assert command_line.job() == job
    assert f"{hosts[2]} takes over rank 1" in log.read_text()
    assert len(command_line.run().read_status_file()["starts"]) == 1
    require_same_curve(command_line.run(), clean_run)


def test_a_killed_agent_of_node_0_is_survived_by_the_job(
    command_line: CommandLine, clean_run: Run
) -> None:
    started, hosts = start_by_slurm(command_line, "launch.nodes=3")
    os.kill(command_line.agent(hosts[0]), signal.SIGKILL)
    measure_next_step(command_line, "by Slurm, agent of node 0 killed")
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    assert len(command_line.run().read_status_file()["starts"]) == 1
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()
