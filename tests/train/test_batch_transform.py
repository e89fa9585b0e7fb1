"""An experiment's `batch_transform`: it changes training batches alone, and a resumed run repeats
it to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_experiments
import torch
import toy_experiments
from toy_experiments import trace
from worlds import (
    Trained,
    differing,
    losses,
    metrics,
    state_at,
    traced_lines,
    train_world,
)

import echelon
from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import Batch, BlockSlice
from echelon.errors import EchelonError, ExitCode
from echelon.snapshot.state import pack_rng_state

BATCHES = ("trainer.batch_size=5", "trainer.epochs=3")
STEPS = 12


def mix(batch: Any) -> Any:
    """Mixes every sample with another one, and draws from all generators."""
    numbers, x, y = batch
    share = torch.rand(len(x)) + random.random() + np.random.rand()
    trace(mixed=numbers.tolist(), share=share.tolist())
    return numbers, x * share.unsqueeze(1) + 0.1 * x.flip(0), y * share + 0.1 * y.flip(0)


def turn(batch: Any) -> Any:
    """Draws nothing, and gives another kind of batch."""
    numbers, x, y = batch
    return {"numbers": numbers, "x": -x, "y": -y}


def trained(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    experiment.batch_transform = mix
    return experiment


def stepped(cfg: step_experiments.Settings) -> echelon.Experiment:
    experiment = step_experiments.regression(cfg)
    experiment.batch_transform = mix
    return experiment


def turned(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    experiment.batch_transform = turn
    experiment.predict = lambda model, batch: (model(batch["x"]).squeeze(-1), batch["y"])
    return experiment


def spoiled(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    experiment.batch_transform = lambda batch: (batch[0], batch[1] / 0, batch[2])
    return experiment


def run_transformed(
    folder: Path, size: int, kind: Callable[..., Any], *words: str, name: str = "a", **env: str
) -> Trained:
    return train_world(
        folder,
        size,
        *(*BATCHES, *words),
        name=name,
        experiment=kind,
        env=env,
        end_together="KILL" in env.get("ECHELON_TEST_FAULT", ""),
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (trained, ("trainer.accumulate=2", "eval_samples=5", "dropout=0.3")),
        (stepped, ("trainer.best=error", "dropout=0.3")),
    ],
)
def test_killed_it_repeats_what_it_drew(
    kind: Callable[..., Any], words: tuple[str, ...], size: int, tmp_path: Path
) -> None:
    words = (*words, "trainer.save.steps=1")
    whole = run_transformed(tmp_path, size, kind, *words, name="whole")
    assert set(whole.codes) == {0}, whole.said
    killed = run_transformed(tmp_path, size, kind, *words, ECHELON_TEST_FAULT="0:6:KILL")
    assert -9 in killed.codes
    resumed = run_transformed(tmp_path, size, kind, *words)
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, STEPS), state_at(whole.run, STEPS)) == []


@pytest.mark.slow
def test_every_training_batch_is_transformed_and_nothing_else(tmp_path: Path) -> None:
    """Each rank draws its own numbers, in every step others."""
    folder = tmp_path / "trace"
    folder.mkdir()
    words = ("eval_samples=5", "samples=20")
    ended = run_transformed(tmp_path, 2, trained, *words, ECHELON_TEST_TRACE=str(folder))
    assert ended.codes == [0, 0], ended.said
    drawn = traced_lines(folder, "mixed")
    assert sorted(n for line in drawn for n in line["mixed"]) == sorted([*range(20)] * 3)
    shares = [share for line in drawn for share in line["share"]]
    assert len(set(shares)) == len(shares)


@pytest.mark.slow
def test_what_draws_nothing_is_the_same_at_any_world_size(tmp_path: Path) -> None:
    """Three ranks share a batch of two samples, and four parts a share of one."""
    ended = [
        run_transformed(tmp_path, size, turned, *words, name=f"of-{size}")
        for size, words in ((1, ()), (2, ("trainer.accumulate=4",)), (3, ()))
    ]
    for result in ended:
        assert set(result.codes) == {0}, result.said
        assert losses(result.run) == pytest.approx(losses(ended[0].run), rel=1e-5)


@pytest.mark.slow
def test_it_is_for_shards_and_stages_too(tmp_path: Path) -> None:
    whole = run_transformed(tmp_path, 1, turned, name="whole")
    for words in (("replica.kind=fsdp",), ("replica.devices=2",)):
        name = words[0].partition("=")[2]
        ended = run_transformed(tmp_path, 2, turned, *words, name=name)
        assert ended.codes == [0, 0], ended.said
        assert losses(ended.run) == pytest.approx(losses(whole.run), rel=1e-5)


@pytest.mark.slow
def test_what_it_makes_of_a_sample_is_named(tmp_path: Path) -> None:
    ended = run_transformed(tmp_path, 1, spoiled)
    assert ended.codes == [ExitCode.FAILED]
    assert "of train_data, after batch_transform, has" in ended.said


# --- without a training ---


def make_transform(function: Callable[[Any], Any], seed: int = 0, rank: int = 0) -> BatchTransform:
    return BatchTransform(function, seed, rank, torch.device("cpu"))


def draw(batch: Any) -> Any:
    return (batch[0] + torch.rand(len(batch[0])) + random.random() + np.random.rand(),)


def test_what_is_drawn_depends_on_seed_step_and_rank_alone() -> None:
    zeros = (torch.zeros(4),)
    seen = []
    for seed, rank, step in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        torch.rand(3)  # what else a step draws
        before = pack_rng_state()
        drawn = [make_transform(draw, seed, rank).transform_data(zeros, 4, step) for _ in range(2)]
        assert torch.equal(pack_rng_state(), before)
        assert torch.equal(drawn[0][0], drawn[1][0])
        seen.append(tuple(drawn[0][0].tolist()))
    assert len(set(seen)) == 4


def name_columns(batch: Any) -> Any:
    return {"x": batch[0]}


def add_number(batch: Any) -> Any:
    return (*batch, 0.5)


def test_a_batch_of_tensors_stays_one_that_a_captured_step_reads() -> None:
    part = BlockSlice((torch.arange(8.0), torch.arange(8)), 4, 4)
    changed = make_transform(lambda batch: [batch[0] * 2, batch[1]]).transform(part, 0)
    assert isinstance(changed, BlockSlice)
    assert changed.data is not None
    assert changed.data[0].tolist() == [8.0, 10.0, 12.0, 14.0]
    for function in (name_columns, add_number):
        assert isinstance(make_transform(function).transform(part, 0), Batch)
    empty = Batch(None, 0)
    assert make_transform(draw).transform(empty, 0) is empty


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda batch: None, "batch_transform returned nothing"),
        (lambda batch: (batch[0][:2],), "batch_transform made 2 rows of 4 samples"),
    ],
)
def test_what_it_must_not_return(function: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(EchelonError, match=said):
        make_transform(function).transform(Batch((torch.zeros(4),), 4), 0)
