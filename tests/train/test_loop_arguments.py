"""What is typed and what a loop gives: one of the two decides, and never in silence."""

from __future__ import annotations

import pytest

from echelon.config.schema import TrainerConfig
from echelon.errors import EchelonError
from echelon.train.loop_arguments import require_no_lost_settings

CALL = "session.batches"


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        (TrainerConfig(), {"batch_size": 64, "epochs": 9, "steps": None}),
        (TrainerConfig(epochs=9, batch_size=64), {"batch_size": 64, "epochs": 9}),
        (TrainerConfig(epochs=9, steps=4), {"batch_size": 64}),
        (TrainerConfig(batch_size=64), {"epochs": 9}),
    ],
)
def test_settings_that_the_loop_does_not_replace(
    trainer: TrainerConfig, given: dict[str, int | None]
) -> None:
    require_no_lost_settings(trainer, CALL, **given)


@pytest.mark.parametrize(
    ("trainer", "given", "lost"),
    [
        (TrainerConfig(epochs=9), {"epochs": 2}, ["trainer.epochs=9"]),
        (TrainerConfig(epochs=9), {"steps": 20}, ["trainer.epochs=9"]),
        (TrainerConfig(steps=9), {"epochs": 2}, ["trainer.steps=9"]),
        (TrainerConfig(steps=9), {"steps": 20}, ["trainer.steps=9"]),
        (
            TrainerConfig(epochs=9, batch_size=64),
            {"epochs": 2, "batch_size": 8},
            ["trainer.batch_size=64", "trainer.epochs=9"],
        ),
    ],
)
def test_settings_that_the_loop_replaces(
    trainer: TrainerConfig, given: dict[str, int | None], lost: list[str]
) -> None:
    with pytest.raises(EchelonError) as caught:
        require_no_lost_settings(trainer, CALL, **given)
    assert [fault.what.partition(" has no effect")[0] for fault in caught.value.faults] == lost
