"""Schedules that wait for a number of an evaluation: the same rates on any number of processes and
after any end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import session_loops
import step_experiments
import torch
import toy_experiments
from worlds import Trained, differing, metrics, state_at, train_world

import echelon
from echelon.errors import ExitCode

pytestmark = pytest.mark.slow

WORDS = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.evaluate.steps=2")
"""17 samples: four steps an epoch."""
STEPS = 12


def add_plateau(experiment: echelon.Experiment) -> echelon.Experiment:
    """The rate falls to a half after every second evaluation, as none is ever better."""
    experiment.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        experiment.optimizer, factor=0.5, patience=1
    )
    experiment.eval_data = session_loops.make_data(3)
    experiment.evaluate = lambda model, batches: {"loss": (1.0, 1), "accuracy": (1.0, 1)}
    return experiment


def trained(cfg: toy_experiments.Settings) -> echelon.Experiment:
    return add_plateau(toy_experiments.regression(cfg))


def stepped(cfg: step_experiments.Settings) -> echelon.Experiment:
    return add_plateau(step_experiments.regression(cfg))


def unevaluated(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = trained(cfg)
    experiment.eval_data = experiment.evaluate = None
    return experiment


KINDS: list[Callable[..., Any]] = [trained, stepped]


def run_plateau(
    folder: Path, size: int, kind: Callable[..., Any], *words: str, name: str = "a", **env: str
) -> Trained:
    return train_world(
        folder,
        size,
        *(*WORDS, *words),
        name=name,
        experiment=kind,
        env=env,
        end_together="KILL" in env.get("ECHELON_TEST_FAULT", ""),
    )


def read_rates(ended: Trained) -> list[float]:
    return [line["lr"] for line in metrics(ended.run) if "lr" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_falls_when_evaluations_get_no_better(
    kind: Callable[..., Any], tmp_path: Path
) -> None:
    for size in (1, 2, 3):
        ended = run_plateau(tmp_path, size, kind, "lr=0.08", name=f"of-{size}")
        assert set(ended.codes) == {0}, ended.said
        # The first evaluation is the best; the third and the fifth are the second worse ones.
        assert read_rates(ended) == [0.08] * 6 + [0.04] * 4 + [0.02] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_it_goes_on_exactly(size: int, kind: Callable[..., Any], tmp_path: Path) -> None:
    """After a kill, and after an end whose step was saved before the evaluation that made the rate
    fall."""
    saves = ("trainer.save.steps=2", "trainer.keep_last=99")
    whole = run_plateau(tmp_path, size, kind, *saves, name="whole")
    assert set(whole.codes) == {0}, whole.said
    killed = run_plateau(tmp_path, size, kind, *saves, ECHELON_TEST_FAULT="0:5:KILL")
    assert -9 in killed.codes
    shorter = run_plateau(tmp_path, size, kind, *saves, "trainer.steps=6")
    assert set(shorter.codes) == {0}, shorter.said
    resumed = run_plateau(tmp_path, size, kind, *saves)
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, STEPS), state_at(whole.run, STEPS)) == []


def test_where_it_cannot_work_it_is_refused(tmp_path: Path) -> None:
    ended = run_plateau(tmp_path, 1, unevaluated)
    assert ended.codes == [ExitCode.USAGE]
    assert "ReduceLROnPlateau, waits for a number of every evaluation" in ended.said
    assert "trainer.schedule=cosine" in ended.said
    for kind in KINDS:
        ended = run_plateau(tmp_path, 1, kind, "trainer.best=accuracy", name=kind.__name__)
        assert ended.codes == [ExitCode.USAGE]
        assert "has mode='min', but the best value of accuracy" in ended.said
        assert "mode='max'" in ended.said
