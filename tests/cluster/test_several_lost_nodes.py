"""Several nodes are lost at once, or the network falls into more than two parts.

The cluster has three hosts; where a world has more nodes, some of them share a host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from command_line import START_S, CommandLine
from command_runner import RunningCommand, free_port, only_run, until, workers
from lost_ranks import LOOPS, list_words, require_same_numbers
from lost_ranks import SETTINGS as LOOP_SETTINGS
from node_worlds import (
    PACE,
    SETTINGS,
    require_same_curve,
    wait_for_ends,
    wait_for_text,
)
from worlds import run_forked

from echelon.errors import ExitCode
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def start_world(
    command_line: CommandLine, hosts: Sequence[str], *words: str
) -> list[RunningCommand]:
    """A node of launch=env for every name of a host, training."""
    port = free_port()
    all_words = ("train", "launch=env", "launch.procs=1", *SETTINGS, *PACE, *words)
    world = command_line.env_world(*all_words, port=port, hosts=hosts)
    command_line.wait_for_step(10)
    return world


def find_agent(node: RunningCommand) -> int:
    """The agent of one node, where several share a host."""
    return next(pid for pid in node.find_all() if workers(pid))


def kill_together(world: Sequence[RunningCommand], *nodes: int) -> None:
    agents = [find_agent(world[node]) for node in nodes]
    for agent in agents:
        os.kill(agent, signal.SIGKILL)


@pytest.mark.parametrize("nodes", [(1, 3), (0, 1)])
def test_two_of_five_nodes_are_lost_at_the_same_moment(
    nodes: tuple[int, int], command_line: CommandLine, clean_run: Run
) -> None:
    a, b, c = command_line.cluster.nodes
    world = start_world(command_line, [a, b, c, a, b])
    kill_together(world, *nodes)
    wait_for_text(command_line, "going on with 3 processes")
    codes = wait_for_ends(world)
    left = [code for node, code in enumerate(codes) if node not in nodes]
    assert left == [ExitCode.OK] * 3, command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_of_two_lost_nodes_a_spare_takes_the_place_of_one(
    command_line: CommandLine, clean_run: Run
) -> None:
    """Five nodes, one of them a spare: three are a majority."""
    a, b, c = command_line.cluster.nodes
    world = start_world(command_line, [a, b, c, a, b], "launch.spares=1")
    kill_together(world, 1, 2)
    back = "replaced: 3 processes"
    wait_for_text(command_line, back)
    codes = wait_for_ends(world)
    assert [codes[0], *codes[3:]] == [ExitCode.OK] * 3, command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_a_spare_takes_over_from_node_0_after_a_restart(
    command_line: CommandLine, clean_run: Run
) -> None:
    """What its rank compares itself with is of the second attempt."""
    words = ("launch.spares=1", "launch.max_restarts=1", "fault=error", "on=1", "at=25")
    once = f"once={command_line.folder}/once"
    world = start_world(command_line, command_line.cluster.nodes, *words, once)
    restarted = "starting again, 1 restart(s) left"
    until(lambda: restarted in command_line.output(), START_S, "a restart")
    command_line.wait_for_step(30)
    kill_together(world, 0)
    back = "rank 0 replaced: 2 processes"
    wait_for_text(command_line, back)
    assert wait_for_ends(world)[1:] == [ExitCode.OK] * 2, command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_of_three_sides_the_majority_goes_on(command_line: CommandLine, clean_run: Run) -> None:
    """Three nodes and twice one. Node 0 is alone, so that the majority needs another leader."""
    a, b, c = command_line.cluster.nodes
    world = start_world(command_line, [a, b, c, c, c])
    for host in (a, b):
        command_line.cluster.link(host, "down")
    wait_for_text(command_line, "going on with 3 processes")
    codes = wait_for_ends(world)
    assert codes == [ExitCode.NODE_LOST] * 2 + [ExitCode.OK] * 3, command_line.recent_output()
    for node in world[:2]:
        assert "nodes are no majority, so this side ends" in node.read_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()


def test_of_three_sides_without_a_majority_nobody_goes_on(command_line: CommandLine) -> None:
    """Two nodes, two nodes and one: each side may believe that the other two go on together."""
    a, b, c = command_line.cluster.nodes
    world = start_world(command_line, [a, a, b, b, c])
    for host in (a, b):
        command_line.cluster.link(host, "down")
    codes = wait_for_ends(world)
    assert codes == [ExitCode.NODE_LOST] * 5, command_line.recent_output()
    status = command_line.run().read_status_file()
    assert (status["state"], status["failure"]["exit"]) == ("failed", ExitCode.NODE_LOST)
    for host in (a, b):
        command_line.cluster.link(host, "up")
    command_line.require_nothing_left()


@pytest.mark.parametrize("function", ["loop", "steps"])
def test_a_loop_of_ones_own_survives_a_lost_node(
    function: str, command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The node of rank 0, whose process writes the metrics: the others go back to a copy."""
    clean = tmp_path_factory.mktemp("clean")
    settings = ("trainer.steps=80", "launch.procs=3", "pause_s=0")
    done = run_forked(list_words(function, *settings), clean)
    assert done.code == 0, done.err
    own = (f"experiment={LOOPS}:{function}", "run.name=a", *LOOP_SETTINGS, "trainer.steps=80")
    pace = ("launch.silence_s=8", "missing_pause_s=0.1")
    world = command_line.env_world(
        "train", "launch=env", "launch.procs=1", *own, *pace, port=free_port(), nodes=3
    )
    command_line.wait_for_step(15)
    kill_together(world, 0)
    codes = wait_for_ends(world)
    assert codes == [-signal.SIGKILL, ExitCode.OK, ExitCode.OK], command_line.recent_output()
    assert "going on with 2 processes" in command_line.output()
    require_same_numbers(command_line.run().folder, only_run(clean))
    command_line.require_nothing_left()


def test_a_job_below_min_nodes_saves_from_memory_and_is_queued_again(
    command_line: CommandLine, clean_run: Run
) -> None:
    """There was no snapshot before: what the next job begins with was in memory."""
    words = ("launch.nodes=3", "launch.min_nodes=3", "launch.procs=1", "launch.threads=1")
    never = ("trainer.save.steps=null", "launch.max_requeues=3")
    all_words = (*SETTINGS, *PACE, *words, *never)
    started = command_line.start("train", "launch=slurm", *all_words, "--wait")
    command_line.wait_for_step(10)
    job, run = command_line.job(), command_line.run()
    assert run.find_newest_step() in (0, None)
    os.kill(command_line.agent(command_line.hosts(job)[1]), signal.SIGKILL)
    done = started.wait(600)
    assert done.code == ExitCode.OK, done.err
    assert command_line.job() == job
    first, second = read_history(run, is_running=False).phases
    assert first.last_step == second.first_step  # every step once, but the one cut short
    assert first.last_step is not None
    assert first.last_step >= 10
    assert "2 nodes are left, and launch.min_nodes=3" in run.get_node_log_file(0).read_text()
    require_same_curve(run, clean_run)
    command_line.require_nothing_left()
