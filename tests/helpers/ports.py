"""Trains the files of examples/ports, in forked ranks, and kills them in the midst of it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_runner import EXAMPLES
from torch.optim.optimizer import register_optimizer_step_post_hook
from worlds import Trained, differing, losses, metrics, snapshot_steps, state_at, train_world

from echelon.experiment.loading import load_function


def train_port(
    folder: Path, world_size: int, entry: str, *words: str, name: str, kill_step: int = 0
) -> Trained:
    """Train `FILE.py:FUNCTION` of the ports. With `kill_step` the last rank is killed after its
    step of that number, which counts the steps of all its optimizers."""
    trained = train_world(
        folder,
        world_size,
        *words,
        name=name,
        experiment=load_function(f"{EXAMPLES / 'ports'}/{entry}"),
        end_together=kill_step > 0,
        prepare=partial(kill_after_step, world_size - 1, kill_step),
    )
    assert "lr_scheduler" not in str(trained.said)  # a warning of torch
    return trained


def kill_after_step(killed_rank: int, kill_step: int, rank: int) -> None:
    steps = 0

    def count_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == kill_step:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == killed_rank and kill_step:
        register_optimizer_step_post_hook(count_step)


def require_promises(
    folder: Path, entry: str, *words: str, kill_step: int, limit: float = 1e-4
) -> Trained:
    """Train a port on one process and on two, which must give the same losses; kill the one of two
    processes and resume it, which must give the same to the bit. Returns the run of one."""
    alone = train_port(folder, 1, entry, *words, name="alone")
    whole = train_port(folder, 2, entry, *words, name="whole")
    for trained in (alone, whole):
        assert set(trained.codes) == {0}, trained.said
    assert losses(alone.run) == pytest.approx(losses(whole.run), rel=limit, abs=limit)
    require_exact_resume(folder, whole, entry, *words, kill_step=kill_step)
    return alone


def require_exact_resume(
    folder: Path, whole: Trained, entry: str, *words: str, kill_step: int
) -> None:
    """Kill a port and resume it, which must give the same as the run that ran whole, to the bit.

    Two saves are due before `kill_step`: the second waits until the first is on disk.
    """
    size = len(whole.ranks)
    killed = train_port(folder, size, entry, *words, name="killed", kill_step=kill_step)
    assert set(killed.codes) == {-signal.SIGKILL}, killed.said
    last = snapshot_steps(whole.run)[-1]
    assert 0 < snapshot_steps(killed.run)[-1] < last
    resumed = train_port(folder, size, entry, *words, name="killed")
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, last), state_at(whole.run, last)) == []


def read_column(trained: Trained, name: str) -> list[float]:
    """The values of a metric in the order of steps."""
    return [line[name] for line in metrics(trained.run) if name in line]
