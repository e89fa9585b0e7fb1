"""The same numbers at any world size: curves to rounding, evaluation to the bit, samples once."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_experiments
from worlds import global_batches, losses, metrics, spawn_world, traced_lines, train_world

from echelon.data.sample_order import map_positions

pytestmark = pytest.mark.slow

WORLDS = (1, 2, 3, 4)
SIZES = range(1, 18)


def _choose_worlds(number: int) -> tuple[int, ...]:
    """One process, four, and by turns two or three: every size meets every world size."""
    return (1, 2 + number % 2, 4)


# Every size meets both optimizers, whole and accumulated batches, with and without clipping, and a
# batch that is odd, equal to a world size, or larger than the data.
COMBINATIONS = [
    (size, batch, optimizer, accumulate, clip)
    for size in SIZES
    for batch, optimizer, accumulate, clip in (
        ((3, 4, 5, 7)[size % 4], "momentum", 1 + 2 * (size % 2), "0.5"),
        ((5, 20, 3, 4, 9)[size % 5], "adam", 3 - 2 * (size % 2), "null"),
    )
]


@pytest.mark.parametrize(("size", "batch", "optimizer", "accumulate", "clip"), COMBINATIONS)
def test_curves_are_equal_to_rounding(
    tmp_path: Path, size: int, batch: int, optimizer: str, accumulate: int, clip: str
) -> None:
    words = (
        f"samples={size}",
        f"optimizer={optimizer}",
        f"trainer.batch_size={batch}",
        f"trainer.accumulate={accumulate}",
        f"trainer.clip={clip}",
        "trainer.epochs=3",
    )
    curves = {}
    for world_size in [w for w in _choose_worlds(size + (optimizer == "adam")) if w <= batch]:
        trained = train_world(tmp_path, world_size, *words, name=f"of-{world_size}")
        assert trained.codes == [0] * world_size, trained.said
        curves[world_size] = losses(trained.run)
    assert len(curves[1]) == 3 * -(-size // batch)
    for world_size, curve in curves.items():
        assert curve == pytest.approx(curves[1], rel=1e-5), f"at {world_size} processes"


def test_clipping_was_felt(tmp_path: Path) -> None:
    """Else the grid above would say nothing about it."""
    free, clipped = (
        train_world(tmp_path, 1, f"trainer.clip={clip}", "trainer.batch_size=5", name=f"c-{clip}")
        for clip in ("null", "0.5")
    )
    assert losses(free.run)[0] == losses(clipped.run)[0]
    assert losses(free.run)[-1] != pytest.approx(losses(clipped.run)[-1], rel=1e-2)


def train_by_hand(rank: int, master: str) -> list[float]:
    torch.manual_seed(0)
    parts = toy_experiments.regression(toy_experiments.Settings(samples=17, optimizer="adam"))
    torch.manual_seed(1)
    curve = []
    for epoch in range(2):
        order = map_positions(torch.arange(17), 17, seed=0, epoch=epoch)
        for rows in order.split(5):
            assert parts.predict is not None
            loss = parts.loss(*parts.predict(parts.model, [t[rows] for t in parts.train_data]))
            parts.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
            parts.optimizer.step()
            curve.append(loss.item())
    return curve


def test_a_hand_written_loop_gives_the_same_curve(tmp_path: Path) -> None:
    [plain] = spawn_world(1, train_by_hand, tmp_path / "by-hand")
    words = ("optimizer=adam", "trainer.batch_size=5", "trainer.epochs=2", "trainer.clip=1.0")
    ours = train_world(tmp_path, 1, *words)
    assert plain.code == 0, plain.output
    assert losses(ours.run) == plain.value


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_is_equal_exactly(tmp_path: Path, size: int) -> None:
    """As text, since a metric of one sample may be NaN, which equals nothing."""
    words = (
        f"eval_samples={size}",
        "metrics=true",
        "trainer.epochs=0",
        f"trainer.eval_batch_size={1 + 2 * (size % 3)}",
    )
    results = {}
    for world_size in _choose_worlds(size):
        trained = train_world(tmp_path, world_size, *words, name=f"of-{world_size}")
        assert trained.codes == [0] * world_size, trained.said
        [results[world_size]] = metrics(trained.run)
    assert results[1].keys() == {"step", "epoch", "eval_loss", *_EVALUATED}
    for world_size, found in results.items():
        assert repr(found) == repr(results[1]), f"at {world_size} processes"


_EVALUATED = {
    f"eval_{name}" for name in ("mae", "mse", "mean", "spearman", "auroc", "pearson", "largest")
}


def evaluate_all_at_once(rank: int, master: str) -> dict[str, float]:
    from metric_set import metric_set

    torch.manual_seed(0)
    parts = toy_experiments.regression(toy_experiments.Settings(eval_samples=17))
    assert parts.predict is not None
    with torch.no_grad():
        output, target = parts.predict(parts.model.eval(), parts.eval_data)
    found = {"loss": parts.loss(output, target).item()}
    for name, metric in metric_set().items():
        metric.update(output, target)
        found[name] = metric.compute().item()
    return found


def test_evaluation_equals_torchmetrics_over_all_samples(tmp_path: Path) -> None:
    [expected] = spawn_world(1, evaluate_all_at_once, tmp_path / "at-once")
    words = ("eval_samples=17", "metrics=true", "trainer.epochs=0", "trainer.eval_batch_size=17")
    exact = metrics(train_world(tmp_path, 3, *words, name="one-batch").run)[0]
    words = (*words[:-1], "trainer.eval_batch_size=3")
    cut = metrics(train_world(tmp_path, 3, *words, name="cut").run)[0]
    assert expected.code == 0, expected.output
    for name, value in expected.value.items():
        assert exact[f"eval_{name}"] == pytest.approx(value, rel=1e-6)
        if name != "auroc":  # torchmetrics itself decides per update whether to take a sigmoid
            assert cut[f"eval_{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once_per_epoch_in_one_global_order(tmp_path: Path, workers: int) -> None:
    orders = {}
    for world_size in WORLDS:
        traced = tmp_path / f"trace-{world_size}"
        traced.mkdir()
        words = ("dataset=true", f"trainer.loader_workers={workers}", "trainer.batch_size=5")
        trained = train_world(
            tmp_path,
            world_size,
            *words,
            "trainer.epochs=2",
            name=f"of-{world_size}",
            env={"ECHELON_TEST_TRACE": str(traced)},
        )
        assert trained.codes == [0] * world_size, trained.said
        asked = Counter(line["asked"] for line in traced_lines(traced, "asked"))
        assert asked == Counter(dict.fromkeys(range(17), 2)), "fetched once per epoch, no more"
        orders[world_size] = global_batches(traced)
    per_epoch = orders[1][:4], orders[1][4:]
    for epoch in per_epoch:
        assert [len(batch) for batch in epoch] == [5, 5, 5, 2]
        assert sorted(chain(*epoch)) == list(range(17))
    assert per_epoch[0] != per_epoch[1], "another order in every epoch"
    assert all(order == orders[1] for order in orders.values())


def test_shares_differ_by_at_most_one_sample(tmp_path: Path, traced: Path) -> None:
    words = ("trainer.batch_size=7", "trainer.epochs=1")
    trained = train_world(tmp_path, 4, *words, env={"ECHELON_TEST_TRACE": str(traced)})
    assert trained.codes == [0] * 4, trained.said
    shares: dict[int, dict[int, int]] = {}
    for line in traced_lines(traced, "batch"):
        shares.setdefault(line["batch"], {})[line["rank"]] = len(line["samples"])
    filled = {step: [of.get(rank, 0) for rank in range(4)] for step, of in shares.items()}
    assert [sum(filled[step]) for step in (1, 2, 3)] == [7, 7, 3]
    assert all(max(of) - min(of) <= 1 for of in filled.values())


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_dataset_and_tensors_give_the_same_curve(tmp_path: Path, world_size: int) -> None:
    curves: list[Any] = []
    for words in (
        ("dataset=false",),
        ("dataset=true",),
        ("dataset=true", "trainer.loader_workers=2"),
    ):
        name = f"as-{len(curves)}"
        words = (*words, "trainer.batch_size=5", "dropout=0.3", "eval_samples=4")
        trained = train_world(tmp_path, world_size, *words, name=name)
        assert trained.codes == [0] * world_size, trained.said
        curves.append(metrics(trained.run))
    assert len(curves[0]) == 12 + 3
    assert curves[1] == curves[0]
    assert curves[2] == curves[0], "with processes that load"
