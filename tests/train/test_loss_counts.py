"""Losses that are not means over samples give the same numbers however a batch is shared."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from token_experiment import TokenSettings, count_tokens, make_token_loss, make_tokens, tagging
from torch import nn
from worlds import losses, metrics, spawn_world, train_world

import echelon
from echelon.data.sample_order import map_positions
from echelon.errors import EchelonError
from echelon.experiment.loss_counts import infer_count, read_count
from echelon.train.loss_parts_check import PartLoss, describe_difference

BATCH, EPOCHS, SAMPLES = 4, 3, 18
WORDS = (f"trainer.batch_size={BATCH}", f"trainer.epochs={EPOCHS}")
WARNING = "warning: the loss of the first batch is "


def train_by_hand(rank: int, master: str, kind: str) -> list[float]:
    torch.manual_seed(0)
    parts = tagging(TokenSettings(loss=kind))
    curve = []
    for epoch in range(EPOCHS):
        order = map_positions(torch.arange(SAMPLES), SAMPLES, seed=0, epoch=epoch)
        for rows in order.split(BATCH):
            tokens, target = (t[rows] for t in parts.train_data)
            loss = parts.loss(parts.model(tokens), target)
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            curve.append(loss.item())
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ignore", "weight", "sum", "own", "own sum"])
def test_a_curve_is_that_of_a_plain_loop(tmp_path: Path, kind: str) -> None:
    [plain] = spawn_world(1, partial(train_by_hand, kind=kind), tmp_path / "by-hand")
    assert plain.code == 0, plain.output
    for world_size, more in (
        (1, "trainer.accumulate=1"),
        (1, "trainer.accumulate=3"),
        (2, "trainer.accumulate=1"),
        (3, "trainer.accumulate=2"),
        (3, "replica.kind=fsdp"),
    ):
        words = (*WORDS, f"loss={kind!r}", more)
        name = f"of-{world_size}-{more[-1]}"
        ended = train_world(tmp_path, world_size, *words, name=name, experiment=tagging)
        assert ended.codes == [0] * world_size, ended.said
        assert losses(ended.run) == pytest.approx(plain.value, rel=1e-6), f"{world_size} {more}"
        assert WARNING not in ended.said


@pytest.mark.slow
def test_an_evaluation_is_the_mean_over_tokens(tmp_path: Path) -> None:
    words = ("trainer.epochs=0", "trainer.eval_batch_size=4", "eval_samples=18")
    found = [
        metrics(train_world(tmp_path, n, *words, name=f"of-{n}", experiment=tagging).run)[-1]
        for n in (1, 3)
    ]
    torch.manual_seed(0)
    parts = tagging(TokenSettings(eval_samples=18))
    tokens, target = parts.eval_data
    with torch.no_grad():
        expected = parts.loss(parts.model(tokens), target).item()
    assert found[0] == found[1]
    assert found[0]["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_killed_run_goes_on_at_another_size(tmp_path: Path) -> None:
    words = (*WORDS, "loss=own", "trainer.save.steps=2")
    whole = train_world(tmp_path, 1, *words, name="whole", experiment=tagging)
    env = {"ECHELON_TEST_FAULT": "1:7:KILL"}
    killed = train_world(
        tmp_path, 2, *words, name="killed", experiment=tagging, env=env, end_together=True
    )
    assert -9 in killed.codes
    again = train_world(tmp_path, 3, *words, name="killed", experiment=tagging)
    assert again.codes == [0, 0, 0], again.said
    assert losses(again.run) == pytest.approx(losses(whole.run), rel=1e-6)
    weights, others = (echelon.load_weights(t.run.folder) for t in (whole, again))
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_known_is_noticed(tmp_path: Path, world_size: int) -> None:
    words = ("trainer.batch_size=8", "trainer.epochs=1", "loss=own", "names_count=false")
    ended = train_world(tmp_path, world_size, *words, experiment=tagging)
    assert ended.codes == [0] * world_size, ended.said
    assert ended.said.count(WARNING) == 1, ended.said
    assert "count=" in ended.said


# --- one process, no world ---


@pytest.mark.parametrize("kind", ["ignore", "weight"])
def test_the_counts_of_torch_are_known(kind: str) -> None:
    """Torch's sum of losses divided by the count is torch's mean."""
    loss, _ = make_token_loss(kind)
    output = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))
    _, target = make_tokens(5, seed=3)
    count = infer_count(loss)
    assert callable(count)
    options: dict[str, Any] = (
        {"ignore_index": loss.ignore_index} if kind == "ignore" else loss.keywords
    )
    total = nn.functional.cross_entropy(output, target, **options, reduction="sum")
    counted = read_count(count, output, target)
    torch.testing.assert_close(total / counted, loss(output, target))


def test_what_is_ignored_by_default_is_not_counted() -> None:
    count = infer_count(nn.functional.cross_entropy)
    assert callable(count)
    for target, expected in (([0, 3, 1], 3), ([0, -100, 1], 2), ([-100, -100], 0), ([], 0)):
        output = torch.zeros(len(target), 4)
        assert read_count(count, output, torch.tensor(target, dtype=torch.int64)) == expected


def test_probabilities_count_once_a_row() -> None:
    count = infer_count(nn.functional.cross_entropy)
    assert callable(count)
    for shape, expected in (((5, 4), 5), ((5, 4, 6), 30), ((4,), 1)):
        output = torch.randn(shape)
        assert read_count(count, output, output.softmax(0)) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.functional.mse_loss, None),
        (nn.MSELoss(), None),
        (nn.MSELoss(reduction="sum"), "sum"),
        (partial(nn.functional.mse_loss, reduction="sum"), "sum"),
        (partial(nn.functional.l1_loss, size_average=False), "sum"),
        (nn.NLLLoss(reduction="sum"), "sum"),
        (lambda output, target: output.sum(), None),
        (count_tokens, None),
    ],
)
def test_what_is_known_of_a_loss(loss: Any, expected: Any) -> None:
    assert infer_count(loss) == expected


@pytest.mark.parametrize("given", [torch.ones(2), "three", None])
def test_a_count_that_is_not_a_number_is_refused(given: Any) -> None:
    with pytest.raises(EchelonError, match="the experiment's count returned"):
        read_count(lambda output, target: given, torch.ones(1), torch.ones(1))


def test_a_difference_is_described() -> None:
    halves = [PartLoss(1.0, 2.0), PartLoss(4.0, 1.0)]
    assert describe_difference(PartLoss(2.0, 3.0), halves, None, 1e-3) is None
    assert describe_difference(PartLoss(2.0, 3.0), halves, count_tokens, 1e-3) is None
    assert describe_difference(PartLoss(5.0, 3.0), halves, "sum", 1e-3) is None
    assert 'count="sum"' in (describe_difference(PartLoss(5.0, 3.0), halves, None, 1e-3) or "")
    text = describe_difference(PartLoss(2.5, 3.0), halves, None, 1e-3) or ""
    assert "2.5, but the mean, weighted by samples, of the losses of its halves is 2:" in text
    empty = [PartLoss(1.0, 2.0), PartLoss(math.nan, 0.0)]
    assert describe_difference(PartLoss(1.0, 2.0), empty, count_tokens, 1e-3) is None
