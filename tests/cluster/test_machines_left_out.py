"""A machine that is at fault is left out, and the run goes on with the numbers of an undisturbed
one."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from command_line import START_S, CommandLine
from command_runner import RunningCommand, free_port, only_run, until
from lost_ranks import LOOPS, list_words, require_same_numbers
from node_worlds import LONG, PACE, SETTINGS, let_run, require_same_curve, wait_for_ends
from worlds import run_forked

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def start_world(command_line: CommandLine, *words: str) -> list[RunningCommand]:
    """Three nodes of launch=env, training."""
    all_words = ("train", "launch=env", *SETTINGS, *PACE, *LONG, *words)
    world = command_line.env_world(*all_words, port=free_port(), nodes=3)
    command_line.wait_for_step(5)
    return world


def kill_worker(command_line: CommandLine, host: str) -> None:
    os.kill(command_line.worker(host), signal.SIGKILL)


def wait_for_text(command_line: CommandLine, text: str, count: int = 1) -> None:
    def is_said() -> bool:
        have_ended = all(n.process.poll() is not None for n in command_line.started)
        is_there = sum(n.read_output().count(text) for n in command_line.started) >= count
        assert is_there or not have_ended, command_line.describe()
        return is_there

    until(is_said, START_S, repr(text), command_line.describe)


def read_bad_machines(command_line: CommandLine) -> list[dict[str, Any]]:
    """As `echelon show --json` has them."""
    done = command_line.type("show", "a", "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["accounting"]["bad_machines"]
    return found


def require_no_loss(command_line: CommandLine) -> None:
    """The machine left at a step boundary, and nothing is left of it."""
    done = command_line.type("show", "a", "--json")
    accounting = json.loads(done.out)["accounting"]
    assert (accounting["steps_redone"], accounting["lost_ranks"]) == (0, 0)
    command_line.require_nothing_left()


@pytest.mark.parametrize("node", [1, 0])
def test_a_machine_that_is_at_fault_twice_is_replaced_by_a_spare(
    node: int, command_line: CommandLine, long_clean_run: Run
) -> None:
    hosts = command_line.cluster.nodes
    world = start_world(command_line, "launch.procs=1", "launch.spares=1", "launch.min_nodes=2")
    kill_worker(command_line, hosts[node])
    wait_for_text(command_line, f"rank {node} replaced: 2 processes")
    kill_worker(command_line, hosts[node])
    wait_for_text(command_line, f"{hosts[2]} takes over rank {node}")
    wait_for_text(command_line, f"rank {node} replaced: 2 processes", count=2)
    let_run(command_line)
    codes = wait_for_ends(world)
    assert codes.pop(node) == ExitCode.LEFT, command_line.recent_output()
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    require_same_curve(command_line.run(), long_clean_run)
    [found] = read_bad_machines(command_line)
    assert (found["host"], found["replaced_by"]) == (hosts[node], hosts[2])
    assert found["is_left_out"]
    assert "killed by SIGKILL" in found["reason"]
    command_line.require_nothing_left()


def test_without_a_spare_it_is_named_and_stays(
    command_line: CommandLine, long_clean_run: Run
) -> None:
    hosts = command_line.cluster.nodes
    world = start_world(command_line, "launch.procs=1")
    for times in (1, 2):
        kill_worker(command_line, hosts[1])
        wait_for_text(command_line, "rank 1 replaced: 3 processes", count=times)
    let_run(command_line)
    assert wait_for_ends(world) == [ExitCode.OK] * 3
    assert "it stays, since no spare is there" in world[0].read_output()
    require_same_curve(command_line.run(), long_clean_run)
    [found] = read_bad_machines(command_line)
    assert (found["is_left_out"], found["kept_because"]) == (False, "no spare is there")
    command_line.require_nothing_left()


def start_by_ssh(command_line: CommandLine, *words: str) -> RunningCommand:
    hosts = f"launch.hosts=[{','.join(command_line.cluster.nodes)}]"
    ssh = f"launch.ssh='ssh -F {command_line.cluster.ssh_config}'"
    all_words = (hosts, ssh, "launch.procs=1", "launch.threads=1", *SETTINGS, *PACE, *LONG, *words)
    started = command_line.start("train", "launch=ssh", *all_words)
    command_line.wait_for_step(5)
    return started


def test_a_host_that_is_lost_twice_is_not_taken_back(
    command_line: CommandLine, long_clean_run: Run
) -> None:
    started = start_by_ssh(command_line, "missing_pause_s=0.3")
    host = command_line.cluster.nodes[1]
    os.kill(command_line.agent(host), signal.SIGKILL)
    wait_for_text(command_line, "rank 1 replaced: 3 processes")
    os.kill(command_line.agent(host), signal.SIGKILL)
    wait_for_text(command_line, f"{host} is at fault (at fault 2 times")
    let_run(command_line)
    done = started.wait()
    assert done.code == ExitCode.OK, done.err
    assert done.err.count(f"{host} takes over rank 1") == 1, done.err
    require_same_curve(command_line.run(), long_clean_run)
    [found] = read_bad_machines(command_line)
    assert (found["host"], found["is_left_out"]) == (host, True)
    command_line.require_nothing_left()


def test_a_slow_machine_is_replaced_by_a_spare_and_no_step_is_made_again(
    command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clean, hosts = tmp_path_factory.mktemp("layers"), command_line.cluster.nodes
    steps = ("trainer.steps=200", "trainer.evaluate.epochs=null")
    done = run_forked(list_words("layers", "launch.procs=2", "pause_s=0", *steps), clean)
    assert done.code == 0, done.err
    slow = (f"slow_host={hosts[1]}", "launch.slow_factor=3", "launch.replace_slow_s=3")
    own = (f"experiment={LOOPS}:layers", "run.name=a", "trainer.batch_size=8", *steps)
    words = ("launch.procs=1", "launch.spares=1", "trainer.log_steps=1", "pause_s=0.05", *slow)
    world = command_line.env_world("train", "launch=env", *own, *words, port=free_port(), nodes=3)
    assert wait_for_ends(world) == [ExitCode.OK, ExitCode.LEFT, ExitCode.OK]
    assert f"{hosts[2]} takes over rank 1" in world[0].read_output()
    require_same_numbers(command_line.run().folder, only_run(clean))
    [found] = read_bad_machines(command_line)
    assert (found["host"], found["replaced_by"]) == (hosts[1], hosts[2])
    assert "× the time of the others" in found["reason"]
    require_no_loss(command_line)
