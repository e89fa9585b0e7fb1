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
