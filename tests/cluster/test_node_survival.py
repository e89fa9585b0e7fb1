"""A node is lost, and the run goes on inside the job with the numbers of an undisturbed one."""

from __future__ import annotations

import os
import signal
import time

import pytest
from command_line import ECHELON, FAULTY, START_S, CommandLine, curve
from command_runner import RunningCommand, free_port, only_run, until
from worlds import run_forked

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

STEPS = 120
SETTINGS = (
    FAULTY,
    "run.name=a",
    "trainer.batch_size=8",
    f"trainer.steps={STEPS}",
    "trainer.save.epochs=null",
    "trainer.save.steps=20",
    "trainer.evaluate.epochs=null",
    "trainer.log_steps=1",
    "launch.silence_s=5",
)
PACE = ("pause_s=0.05", "missing_pause_s=0.2")
"""A replacement comes before the end on a busy machine too."""


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("clean")
    words = [*SETTINGS, "launch=local", "launch.procs=3"]
    done = run_forked([*ECHELON, "train", *words], folder)
    assert done.code == 0, done.err
    return Run(only_run(folder))


def start_world(command_line: CommandLine, *words: str, nodes: int = 3) -> list[RunningCommand]:
    """Nodes of launch=env, training."""
    port = free_port()
    all_words = ("train", "launch=env", "launch.procs=1", *SETTINGS, *PACE, *words)
    world = command_line.env_world(*all_words, port=port, nodes=nodes)
    command_line.wait_for_step(10)
    return world


def measure_next_step(command_line: CommandLine, what: str) -> None:
    """Wait for the next step; `pytest -s` shows how long that took."""
    began, step = time.monotonic(), command_line.step()
    command_line.wait_for_step(step + 1)
    print(f"{what} → next step: {time.monotonic() - began:.2f} s")


def wait_for_ends(world: list[RunningCommand]) -> list[int]:
    until(lambda: all(n.process.poll() is not None for n in world), START_S, "all ended")
    return [node.wait().code for node in world]


def require_same_curve(run: Run, clean: Run) -> None:
    """Every step stands there once, with the number of the clean run."""
    steps, values = zip(*curve(run), strict=True)
    clean_steps, clean_values = zip(*curve(clean), strict=True)
    assert steps == clean_steps
    assert values == pytest.approx(clean_values, rel=1e-4, abs=1e-7)
    assert run.read_status_file()["state"] == "finished"
    assert run.read_status_file()["failure"] is None


@pytest.mark.parametrize("node", [1, 0])
def test_a_killed_node_is_survived_by_the_others(
    node: int, command_line: CommandLine, clean_run: Run
) -> None:
    world = start_world(command_line)
    host = command_line.cluster.nodes[node]
    os.kill(command_line.agent(host), signal.SIGKILL)
    measure_next_step(command_line, f"node {node} killed")
    codes = wait_for_ends(world)
    assert codes.pop(node) == -signal.SIGKILL
    assert codes == [ExitCode.OK] * 2, command_line.recent_output()
    assert f"lost node {node} ({host}, rank {node}) closed its connection" in (
        command_line.recent_output()
    )
    assert "going on with 2 processes" in command_line.recent_output()
    require_same_curve(command_line.run(), clean_run)
    command_line.require_nothing_left()
