"""Training on several stages: the same numbers as on one, at any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toy_experiments
from staged_models import by_hand, deep, free
from worlds import Trained, differing, losses, metrics, state_at, train_world

pytestmark = pytest.mark.slow

WORDS = (
    "trainer.batch_size=5",
    "trainer.clip=0.5",
    "dropout=0.2",
    "eval_samples=9",
    "metrics=true",
)
TWO, THREE = "replica.devices=2", "replica.devices=3"


def _read_last_line(trained: Trained) -> dict[str, object]:
    assert set(trained.codes) == {0}, trained.said
    return state_at(trained.run, metrics(trained.run)[-1]["step"])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_two_stages_are_one_to_the_bit(tmp_path: Path, world_size: int, optimizer: str) -> None:
    words = (*WORDS, f"optimizer={optimizer}", f"trainer.accumulate={world_size}")
    one, two, three = (
        train_world(tmp_path, world_size, *words, *more, name=name, experiment=deep)
        for name, more in {"one": (), "two": (TWO,), "three": (THREE,)}.items()
    )
    assert differing(_read_last_line(one), _read_last_line(two)) == []
    assert differing(_read_last_line(one), _read_last_line(three)) == []
    assert metrics(one.run) == metrics(two.run) == metrics(three.run)
    assert len(losses(one.run)) == 12
    assert "× 2 stages (cpu stage 0: 0 … 5" in two.said


def test_a_rank_without_a_sample(tmp_path: Path) -> None:
    """17 samples in batches of 4 leave one sample for two ranks."""
    words = ("trainer.batch_size=4",)
    one, two = (
        train_world(tmp_path, 2, *words, more, name=name, experiment=deep)
        for name, more in {"one": "replica.devices=1", "two": TWO}.items()
    )
    assert differing(_read_last_line(one), _read_last_line(two)) == []


def test_tables_by_rows_on_two_stages(tmp_path: Path) -> None:
    words = ("trainer.batch_size=5", "trainer.clip=0.5")
    one, two = (
        train_world(tmp_path, 2, *words, more, name=name, experiment=toy_experiments.tables)
        for name, more in {"one": "replica.devices=1", "two": TWO}.items()
    )
    assert differing(_read_last_line(one), _read_last_line(two)) == []
    assert "cpu stage 0: users" in two.said


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_other_stages(tmp_path: Path, before: int, after: int) -> None:
    words = (*WORDS, "optimizer=adam", "trainer.save.steps=1")
    whole = train_world(tmp_path, 1, *words, name="whole", experiment=deep)
    parts = (("trainer.steps=5", before), ("trainer.steps=12", after))
    for more, stages in parts:
        ended = train_world(
            tmp_path, 1, *words, more, f"replica.devices={stages}", name="cut", experiment=deep
        )
    assert differing(_read_last_line(whole), _read_last_line(ended)) == []
    assert "resuming run cut after step 5" in ended.said


def test_layers_placed_by_hand(tmp_path: Path) -> None:
    one = train_world(tmp_path, 1, *WORDS, name="one", experiment=by_hand)
    two = train_world(tmp_path, 2, *WORDS, TWO, name="two", experiment=by_hand)
    assert set(one.codes + two.codes) == {0}, one.said + two.said
    assert torch.tensor(losses(two.run)).isfinite().all()
    assert "cpu stage 0, cpu stage 1: placed by the experiment" in two.said


def test_a_model_that_cannot_be_cut(tmp_path: Path) -> None:
    trained = train_world(tmp_path, 1, TWO, experiment=free)
    assert trained.codes == [2]
    assert "replica.devices=2, but Free cannot be split" in trained.said
    assert "def experiment(cfg, devices)" in trained.said
    assert "Traceback" not in trained.said
