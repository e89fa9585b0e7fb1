"""Nodes leave a run on purpose: the others go on, and nothing counts as a fault."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

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
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


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
    let_run(command_line)
    codes = wait_for_ends(world)
    assert codes.pop(node) == ExitCode.LEFT, command_line.recent_output()
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    left = f"node {node} ({host}, rank {node}): it was sent SIGTERM"
    assert f"left: {left}; going on with 2 processes" in command_line.output()
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
    wait_for_text(command_line, "rank 0 replaced: 2 processes")
    assert wait_for_ends(world) == [ExitCode.LEFT, ExitCode.OK, ExitCode.OK]
    assert f"{hosts[2]} takes over rank 0" in command_line.output()
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


# --- `echelon scale` ---


def scale(command_line: CommandLine, count: int) -> dict[str, Any]:
    done = command_line.type("scale", "a", f"nodes={count}", "--json")
    assert done.code == ExitCode.OK, done.err
    return dict(json.loads(done.out))


def test_a_run_by_ssh_shrinks_and_grows_again(command_line: CommandLine, clean_run: Run) -> None:
    started = start_by_ssh(command_line, "missing_pause_s=0.3")
    hosts = command_line.cluster.nodes
    assert scale(command_line, 2)["left"] == [hosts[2]]
    until(lambda: not command_line.left(hosts[2]), START_S, "it is gone")
    command_line.wait_for_more()
    assert scale(command_line, 3)["starting"] == 1
    back = "rank 2 replaced: 3 processes"
    is_over = started.process.poll
    until(lambda: back in started.read_output() or is_over() is not None, START_S, "it is back")
    assert back in started.read_output(), started.read_output()
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    require_same_curve(command_line.run(), clean_run)
    require_no_fault(command_line.run(), [2])
    command_line.require_nothing_left()


def test_a_run_by_ssh_grows_beyond_its_start(command_line: CommandLine, clean_run: Run) -> None:
    """Its spare takes part as a third node, and node 0 leaves later."""
    started = start_by_ssh(command_line, "launch.spares=1", "pause_s=0.3")
    hosts = command_line.cluster.nodes
    assert scale(command_line, 3)["joining"] == [hosts[2]]
    joined = "rank 2 added: 3 processes"
    is_over = started.process.poll
    until(
        lambda: joined in started.read_output() or is_over() is not None, START_S, "it has joined"
    )
    os.kill(command_line.agent(hosts[0]), signal.SIGTERM)
    wait_for_text(command_line, f"left: node 0 ({hosts[0]}, rank 0)")
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    assert joined in done.err
    require_same_curve(command_line.run(), clean_run)
    require_no_fault(command_line.run(), [0])
    command_line.require_nothing_left()


def grow_by_a_job(command_line: CommandLine, count: int) -> str:
    """Scale to so many nodes, and wait until a further job has joined; returns its number."""
    log = command_line.run().get_node_log_file(0)
    joined = f": {count} processes"
    times = log.read_text().count(joined)
    told = scale(command_line, count)
    assert told["starting"] == 1
    until(lambda: log.read_text().count(joined) > times, START_S, "the further job takes part")
    return str(told["job"])


def wait_for_empty_queue(command_line: CommandLine) -> None:
    until(lambda: not command_line.cluster.slurm("squeue", "-h").strip(), START_S, "no job is left")


def test_a_job_gives_a_node_back_and_gets_another(
    command_line: CommandLine, clean_run: Run
) -> None:
    started, hosts = start_by_slurm(command_line, "launch.nodes=3", "missing_pause_s=1.0")
    job = command_line.job()
    told = scale(command_line, 2)
    assert told["left"] == [hosts[2]]
    assert told["given_back_to_slurm"]
    assert command_line.hosts(job) == hosts[:2]
    command_line.wait_for_more()
    grow_by_a_job(command_line, 3)
    invitation = command_line.run().invitation_file
    assert invitation.stat().st_mode & 0o777 == 0o600
    key = json.loads(invitation.read_text())["key"]
    assert key not in command_line.run().joining_script_file.read_text()
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    require_same_curve(command_line.run(), clean_run)
    require_no_fault(command_line.run(), [2])
    wait_for_empty_queue(command_line)
    assert not invitation.exists()
    refused = command_line.type("scale", "a", "nodes=2")
    assert refused.code == ExitCode.NOT_FOUND
    assert "cannot be scaled: it is finished" in refused.err
    command_line.require_nothing_left()


def test_a_further_job_may_be_taken_away_and_ends_with_the_run(command_line: CommandLine) -> None:
    started, _ = start_by_slurm(command_line, "launch.nodes=2", "trainer.steps=100000")
    further = grow_by_a_job(command_line, 3)
    command_line.cluster.slurm("scancel", further)
    log = command_line.run().get_node_log_file(0)
    until(lambda: "rank 2): it was sent SIGTERM" in log.read_text(), START_S, "it has left")
    command_line.wait_for_more()
    further = grow_by_a_job(command_line, 3)
    job, added = command_line.job(), command_line.hosts(further)
    hosts = command_line.hosts(job)
    told = scale(command_line, 2)  # its node may be on a host of the run's own job
    assert (told["left"], told["given_back_to_slurm"]) == (added, False)
    assert command_line.hosts(job) == hosts
    command_line.wait_for_more()
    assert command_line.type("cancel", "a").code == ExitCode.OK
    started.wait()
    run = command_line.run()
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "it is saved")
    assert run.find_newest_step() == command_line.step()
    require_no_fault(run, [2, 2])
    wait_for_empty_queue(command_line)
    command_line.require_nothing_left()
