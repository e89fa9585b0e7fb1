"""Worlds of which a node is lost, and what must have become of their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from command_line import FAULTY, START_S, curve
from command_runner import RunningCommand, until

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
PACE = ("pause_s=0.05", "missing_pause_s=0.2")
"""A replacement comes before the end on a busy machine too."""


def wait_for_ends(world: Sequence[RunningCommand]) -> list[int]:
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
