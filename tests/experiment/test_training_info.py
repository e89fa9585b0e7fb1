"""What an experiment may know of its training, and schedules that do not fit it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_experiments
from torch import nn
from torch.optim import lr_scheduler
from toy_experiments import trace
from worlds import losses, traced_lines, train_world

import echelon
from echelon.config.schema import Config, TrainerConfig
from echelon.errors import EchelonError
from echelon.experiment.schedule_length import (
    find_epoch_schedule_notes,
    load_schedule_state,
    require_long_schedule,
)
from echelon.experiment.training_info import TrainingInfo, find_info_parameter, make_training_info

INFO = TrainingInfo(5, 3, None, 0, 1, Path("runs/a"))


@pytest.mark.parametrize(
    ("info", "steps"),
    [
        (INFO, 12),
        (replace(INFO, steps=7, epochs=None), 7),
        (replace(INFO, step=4, samples=17, batch_size=9), 4 + 2 * 2),
        (replace(INFO, step=5, samples=17 + 5), 12),
        (replace(INFO, step=16, samples=4 * 17), 16),  # more than was asked for is made already
        (replace(INFO, epochs=0), 0),
    ],
)
def test_total_steps(info: TrainingInfo, steps: int) -> None:
    assert info.count_total_steps(17) == steps


def test_epochs_do_not_count_beside_steps() -> None:
    config = Config(trainer=TrainerConfig(epochs=3, steps=10))
    info = make_training_info(config, 1, 2, Path("a"))
    assert (info.epochs, info.steps, info.rank, info.world_size) == (None, 10, 1, 2)
    assert info.count_epoch_steps(65) == 3


def takes_name(cfg: Any, training: Any) -> None: ...
def takes_annotation(cfg: Any, about: TrainingInfo) -> None: ...
def takes_text(cfg: Any, about: echelon.TrainingInfo | None = None) -> None: ...
def takes_no_settings(about: TrainingInfo) -> None: ...
def takes_settings(training: Any) -> None: ...
def takes_devices(devices: Any, cfg: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (takes_name, "training"),
        (takes_annotation, "about"),
        (takes_text, "about"),
        (takes_no_settings, "about"),
        (takes_settings, None),
        (takes_devices, None),
    ],
)
def test_the_parameter(function: Any, name: str | None) -> None:
    assert find_info_parameter(function) == name


@dataclass
class Settings(toy_experiments.Settings):
    factor: int = 1
    """By which the length of the schedule is wrong."""


def informed(cfg: Settings, devices: Any, training: echelon.TrainingInfo) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    total = training.count_total_steps(cfg.samples)
    experiment.schedule = lr_scheduler.OneCycleLR(
        experiment.optimizer, cfg.lr, total_steps=total // cfg.factor
    )
    trace(
        info=[training.rank, training.world_size, training.step, training.samples],
        total=total,
        epochs=training.epochs,
        folder=str(training.run_folder),
    )
    return experiment


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_experiment_is_told_of_its_training(tmp_path: Path, traced: Path, ranks: int) -> None:
    env = {"ECHELON_TEST_TRACE": str(traced)}
    words = ("trainer.batch_size=5", "trainer.save.steps=1")
    first = train_world(tmp_path, ranks, *words, "trainer.epochs=1", experiment=informed, env=env)
    assert first.codes == [0] * ranks, first.said
    lines = sorted(traced_lines(traced, "info"), key=lambda line: line["rank"])
    assert [line["info"] for line in lines] == [[rank, ranks, 0, 0] for rank in range(ranks)]
    assert {line["total"] for line in lines} == {4}
    assert {line["folder"] for line in lines} == {str(first.run.folder)}
    for file in traced.iterdir():
        file.unlink()
    # Two of three epochs are left: with another batch size they are of two steps each.
    path = first.run.snapshots_folder / "step-000000004"
    more = ("trainer.batch_size=9", "trainer.epochs=3", f"trainer.resume={path}")
    other = train_world(tmp_path, ranks, *more, name="b", experiment=informed, env=env)
    assert other.codes == [0] * ranks, other.said
    lines = sorted(traced_lines(traced, "info"), key=lambda line: line["rank"])
    assert [line["info"] for line in lines] == [[rank, ranks, 4, 17] for rank in range(ranks)]
    assert {line["total"] for line in lines} == {8}
    assert len(losses(other.run)) == 4


@pytest.mark.slow
def test_a_schedule_that_is_too_short_costs_no_step(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 1, "trainer.batch_size=5", "factor=2", experiment=informed)
    assert ended.codes == [2], ended.said
    assert "a OneCycleLR, ends after 6 steps, but the training makes 12" in ended.said
    assert "total_steps=training.count_total_steps(len(train_data))" in ended.said


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10), "CosineAnnealingLR with T_max"),
        (lambda o: lr_scheduler.StepLR(o, step_size=3), "StepLR with step_size up to 3"),
        (lambda o: lr_scheduler.MultiStepLR(o, [3, 8]), "MultiStepLR with milestones up to 8"),
        (
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, T_max=10)],
                milestones=[5],
            ),
            "CosineAnnealingLR with T_max",
        ),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=1000), None),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=5), None),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), None),
        (lambda o: None, None),
    ],
)
def test_a_schedule_by_epochs_is_noticed(make: Any, said: str | None) -> None:
    schedule = make(make_optimizer())
    found = list(find_epoch_schedule_notes(schedule, epochs=10, epoch_steps=100))
    assert len(found) == (said is not None)
    assert all((said or "") in text and "not every epoch of 100" in text for text in found)
    assert list(find_epoch_schedule_notes(schedule, epochs=10, epoch_steps=1)) == []


def test_a_schedule_that_lasts_is_taken() -> None:
    schedule = lr_scheduler.OneCycleLR(make_optimizer(), 0.1, total_steps=10)
    require_long_schedule(schedule, 10)
    with pytest.raises(EchelonError, match="ends after 10 steps, but the training makes 11"):
        require_long_schedule(schedule, 11)
    require_long_schedule(None, 11)


@pytest.mark.parametrize("more", [10, 20])
def test_a_schedule_goes_on_with_the_length_that_it_is_given_now(more: int) -> None:
    """As one of that length that was never interrupted would, from where both are the same."""
    first = lr_scheduler.CosineAnnealingLR(make_optimizer(), T_max=10)
    for _ in range(4):
        first.optimizer.step()
        first.step()
    again = lr_scheduler.CosineAnnealingLR(make_optimizer(), T_max=more)
    load_schedule_state(again, first.state_dict())
    assert (again.last_epoch, again.T_max) == (4, more)
    assert again.get_last_lr() == first.get_last_lr()
