"""`echelon.load` gives the model of a run as it was saved, however many processes trained it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import layer_stack
import pytest
import torch
import toy_experiments
from worlds import Trained, differing, snapshot_steps, spawn_world, state_at, train_world

import echelon
from echelon.errors import EchelonError
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import find_best

pytestmark = pytest.mark.slow

STEPS = ("trainer.batch_size=5", "trainer.steps=8", "trainer.save.steps=2", "eval_samples=7")


def train(folder: Path, ranks: int, *words: str, experiment: Callable[..., Any]) -> Trained:
    ended = train_world(folder, ranks, *STEPS, *words, experiment=experiment)
    assert ended.codes == [0] * ranks, ended.said
    return ended


def compare_loaded(rank: int, master: str, folder: Path) -> None:
    """In a process of its own, because the experiment's file is imported."""
    run = Run(folder)
    os.chdir(folder.parent)
    best = find_best(run.snapshots_folder)
    assert best is not None
    steps: dict[str | int, int] = {step: step for step in snapshot_steps(run)}
    steps |= {"latest": 8, "best": int(best.name[5:])}
    torch.manual_seed(5)
    random.seed(5)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(5)
    random.seed(5)
    for which, step in steps.items():
        model = echelon.load(folder, snapshot=which)  # type: ignore[arg-type]
        assert differing(dict(model.state_dict()), state_at(run, step)["model"]) == []
        assert not model.training
    assert (torch.rand(1), random.random()) == expected, "random numbers are left alone"
    assert differing(dict(echelon.load(folder).state_dict()), dict(model.state_dict())) == []


@pytest.mark.parametrize(
    ("ranks", "words", "experiment"),
    [
        (1, ("metrics=true", "trainer.best=auroc"), toy_experiments.regression),
        (3, (), toy_experiments.regression),
        (2, ("replica.kind=fsdp",), layer_stack.stack),
        (3, ("replica.kind=fsdp", "replica.checkpoint=true"), layer_stack.stack),
        (1, ("replica.devices=2",), toy_experiments.regression),
    ],
    ids=["alone", "three", "fsdp", "fsdp, recomputed", "stages"],
)
def test_the_weights_are_those_of_the_snapshot(
    tmp_path: Path, ranks: int, words: tuple[str, ...], experiment: Callable[..., Any]
) -> None:
    ended = train(tmp_path, ranks, *words, experiment=experiment)
    [done] = spawn_world(
        1, partial(compare_loaded, folder=ended.run.folder), tmp_path / "output-load"
    )
    assert done.code == 0, done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder, 1, experiment=toy_experiments.regression).run


@pytest.mark.parametrize(
    ("which", "what", "do"),
    [
        (3, "step-000000003 is not there", "kept are step-000000004"),
        ("newest", "snapshot='newest' is not a snapshot", '"best", "latest" or a step'),
    ],
)
def test_a_snapshot_that_is_not_there(trained: Run, which: Any, what: str, do: str) -> None:
    with pytest.raises(EchelonError) as told:
        echelon.load(trained.folder, snapshot=which)
    [fault] = told.value.faults
    assert what in fault.what
    assert do in fault.do


def test_a_run_that_is_not_there(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.folder.parent)
    with pytest.raises(EchelonError, match="no run 'b' here"):
        echelon.load("b")


def test_a_program_has_no_model(tmp_path: Path) -> None:
    from echelon.config.schema import Config

    run = Run(tmp_path / "a")
    run.folder.mkdir()
    run.write_config(Config(program=["train.py"]))
    with pytest.raises(EchelonError, match="is a program of `echelon run`"):
        echelon.load(run.folder)
