"""Ranks on several machines that go back to copies of the state in memory; a rank's shards are kept
on another machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import START_S, CommandLine
from command_runner import free_port, only_run, until
from lost_ranks import LOOPS, SETTINGS, list_words, require_same_numbers
from worlds import run_forked

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

WORDS = (*SETTINGS, "trainer.steps=80")


def train_undisturbed(function: str, folder: Path, *more: str) -> Path:
    words = list_words(function, "launch.procs=2", "trainer.steps=80", *more, "pause_s=0")
    done = run_forked(words, folder)
    assert done.code == 0, done.err
    return only_run(folder)


@pytest.mark.parametrize(
    ("function", "more"), [("loop", ()), ("layers", ("replica.kind=fsdp",))], ids=["loop", "fsdp"]
)
def test_ranks_of_any_node_are_replaced(
    function: str,
    more: tuple[str, ...],
    command_line: CommandLine,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    clean = train_undisturbed(function, tmp_path_factory.mktemp("clean"))
    node_0, node_1, _ = command_line.cluster.nodes
    words = (f"experiment={LOOPS}:{function}", "run.name=a", *WORDS, *more, "missing_pause_s=0.5")
    world = command_line.env_world("train", "launch=env", *words, port=free_port())
    seen = world[0].read_output
    command_line.wait_for_step(15)
    os.kill(command_line.worker(node_1), signal.SIGKILL)
    until(lambda: "rank 1 replaced: 2 processes" in seen(), START_S, "rank 1 is back")
    command_line.wait_for_step(35)
    os.kill(command_line.worker(node_0), signal.SIGKILL)
    until(lambda: "rank 0 replaced: 2 processes" in seen(), START_S, "rank 0 is back")
    assert [node.wait().code for node in world] == [0, 0], command_line.recent_output()
    assert "starting again" not in seen()
    require_same_numbers(command_line.run().folder, clean)
    command_line.require_nothing_left()


@pytest.mark.parametrize(("node", "fault"), [(1, "killed"), (0, "killed"), (2, "cut off")], ids=str)
def test_shards_of_a_lost_node_are_on_another_one(
    node: int, fault: str, command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is on disk. Where a node is cut off nobody closes a connection."""
    shards = ("replica.kind=fsdp", "rows=300", "trainer.save.epochs=9", "trainer.evaluate.epochs=9")
    clean = train_undisturbed("layers", tmp_path_factory.mktemp("clean"), *shards)
    words = (f"experiment={LOOPS}:layers", "run.name=a", *WORDS, *shards, "pause_s=0.05")
    env_words = ("train", "launch=env", *words, "launch.silence_s=8")
    world = command_line.env_world(*env_words, port=free_port(), nodes=3)
    command_line.wait_for_step(15)
    host = command_line.cluster.nodes[node]
    if fault == "killed":
        os.kill(command_line.agent(host), signal.SIGKILL)
    else:
        command_line.cluster.link(host, "down")
    codes = [of_node.wait().code for of_node in world]
    assert codes.pop(node) == (-signal.SIGKILL if fault == "killed" else ExitCode.NODE_LOST)
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    assert "which is in memory" in command_line.recent_output()
    require_same_numbers(command_line.run().folder, clean, has_evaluations=False)
    command_line.require_nothing_left()
