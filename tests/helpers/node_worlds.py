"""Runs on the nodes of the test cluster that go on while nodes are gone, and their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import ECHELON, FAULTY, START_S, CommandLine, curve
from command_runner import RunningCommand, free_port, only_run, until
from worlds import run_forked

from echelon.runs.run_folder import Run

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
    "launch.silence_s=8",
)
"""A busy machine may keep a node silent for some seconds."""
LONG = ("trainer.steps=400", "trainer.save.steps=100")
"""Several losses and returns come before the end."""
PACE = ("pause_s=0.05", "missing_pause_s=0.2", "pause_until=seen")
"""What happens to the run comes before its end on a busy machine too; see `let_run`."""


def run_undisturbed(folder: Path, *more: str) -> Run:
    """The run that others are compared with."""
    words = [*SETTINGS, *more, "launch=local", "launch.procs=3"]
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


def let_run(command_line: CommandLine) -> None:
    """What had to happen has happened: no step waits any longer."""
    (command_line.folder / "seen").touch()


def wait_for_text(command_line: CommandLine, text: str) -> None:
    """Wait until a command has said something, and let the run go on to its end."""
    until(lambda: text in command_line.output(), START_S, repr(text), command_line.describe)
    let_run(command_line)


def wait_for_ends(world: list[RunningCommand]) -> list[int]:
    def describe() -> str:
        return "\n".join(node.describe() for node in world)

    until(lambda: all(n.process.poll() is not None for n in world), START_S, "all ended", describe)
    return [node.wait().code for node in world]


def require_same_curve(run: Run, clean: Run) -> None:
    """Every step stands there once, with the number of the clean run."""
    steps, values = zip(*curve(run), strict=True)
    clean_steps, clean_values = zip(*curve(clean), strict=True)
    assert steps == clean_steps
    assert values == pytest.approx(clean_values, rel=1e-4, abs=1e-7)
    assert run.read_status_file()["state"] == "finished"
    assert run.read_status_file()["failure"] is None


def start_by_ssh(command_line: CommandLine, *words: str) -> RunningCommand:
    hosts = f"launch.hosts=[{','.join(command_line.cluster.nodes)}]"
    ssh = f"launch.ssh='ssh -F {command_line.cluster.ssh_config}'"
    all_words = (hosts, ssh, "launch.procs=1", "launch.threads=1", *SETTINGS, *PACE, *words)
    started = command_line.start("train", "launch=ssh", *all_words)
    command_line.wait_for_step(10)
    return started


def start_by_slurm(command_line: CommandLine, *words: str) -> tuple[RunningCommand, list[str]]:
    all_words = ("launch.procs=1", "launch.threads=1", *SETTINGS, *PACE, *words)
    started = command_line.start("train", "launch=slurm", *all_words, "--wait")
    command_line.wait_for_step(10)
    return started, command_line.hosts(command_line.job())
