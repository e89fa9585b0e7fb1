"""Tables with sparse gradients: the same numbers at any world size, and after any end."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import toy_experiments
from worlds import (
    configured,
    differing,
    losses,
    metrics,
    spawn_world,
    state_at,
    train_config,
    train_world,
)

from echelon.data.sample_order import map_positions
from echelon.errors import EchelonError
from echelon.parallel.sparse_tables import require_no_max_norm

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("optimizer", "batch", "words"),
    [
        ("rows", 5, ()),
        ("row_sgd", 5, ("trainer.accumulate=3",)),
        ("rows", 4, ("trainer.clip=0.1", "trainer.accumulate=3")),
        ("sgd", 20, ("trainer.clip=0.1", "scale=64", "trainer.unused_parameters=true")),
        ("rows", 7, ("tower=false",)),
    ],
)
def test_curves_are_equal_to_rounding(
    tmp_path: Path, optimizer: str, batch: int, words: tuple[str, ...]
) -> None:
    """The last batch has fewer samples than there are ranks, so some have none."""
    words = (f"optimizer={optimizer}", f"trainer.batch_size={batch}", "trainer.epochs=4", *words)
    curves = {}
    for world_size in (1, 2, 4):
        trained = train_world(
            tmp_path, world_size, *words, name=f"of-{world_size}", experiment=toy_experiments.tables
        )
        assert trained.codes == [0] * world_size, trained.said
        curves[world_size] = losses(trained.run)
    for world_size, curve in curves.items():
        assert curve == pytest.approx(curves[1], rel=1e-5), f"at {world_size} processes"
    steps = len(curves[1]) // 4
    assert sum(curves[1][-steps:]) < sum(curves[1][:steps]), "it learns"


def train_by_hand(rank: int, master: str, clip: float | None) -> list[float]:
    torch.manual_seed(0)
    parts = toy_experiments.tables(toy_experiments.TableSettings(optimizer="sgd"))
    for module in parts.model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = False
    curve = []
    for epoch in range(2):
        for rows in map_positions(torch.arange(17), 17, seed=0, epoch=epoch).split(5):
            assert parts.predict is not None
            loss = parts.loss(*parts.predict(parts.model, [t[rows] for t in parts.train_data]))
            parts.optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parts.model.parameters(), clip)
            parts.optimizer.step()
            curve.append(loss.item())
    return curve


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_hand_written_loop_with_dense_gradients_gives_the_same_curve(
    tmp_path: Path, clip: float | None
) -> None:
    [plain] = spawn_world(1, partial(train_by_hand, clip=clip), tmp_path / "by-hand")
    assert plain.code == 0, plain.output
    words = ("optimizer=sgd", "trainer.batch_size=5", "trainer.epochs=2")
    clipped = f"trainer.clip={'null' if clip is None else clip}"
    ours = train_world(tmp_path, 1, *words, clipped, experiment=toy_experiments.tables)
    assert losses(ours.run) == pytest.approx(plain.value, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["rows", "row_sgd"])
def test_killed_and_typed_again_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    words = (
        f"optimizer={optimizer}",
        "trainer.batch_size=5",
        "trainer.epochs=3",
        "trainer.save.steps=1",
        "trainer.clip=1.0",
    )
    whole = train_world(tmp_path, 3, *words, name="whole", experiment=toy_experiments.tables)
    assert whole.codes == [0, 0, 0], whole.said
    config = configured(tmp_path, ["run.name=a", *words], toy_experiments.tables)
    killed = train_config(
        tmp_path, 3, config, env={"ECHELON_TEST_FAULT": "1:6:KILL"}, end_together=True
    )
    assert -signal.SIGKILL in killed.codes, killed.said
    again = train_config(tmp_path, 3, config)
    assert again.codes == [0, 0, 0], again.said
    assert metrics(again.run) == metrics(whole.run)
    assert differing(state_at(again.run, 12), state_at(whole.run, 12)) == []


def test_a_table_that_is_used_as_a_whole_is_named(tmp_path: Path) -> None:
    trained = train_world(tmp_path, 2, "misused=true", experiment=toy_experiments.tables)
    assert 0 not in trained.codes
    assert "users.weight belongs to an embedding with sparse=True" in trained.said
    assert "sparse=False" in trained.said


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rows_that_each_process_would_shorten_alone(tmp_path: Path, kind: str) -> None:
    words = ("max_norm=0.5", "trainer.batch_size=5", f"replica.kind={kind}")
    ended = train_world(tmp_path, 2, *words, experiment=toy_experiments.tables)
    assert ended.codes == [2, 2]
    for rank in ended.ranks:
        assert "the layer 'users' is an Embedding with max_norm=0.5" in rank.output
        assert "leave max_norm out" in rank.output
    assert "Traceback" not in ended.said


def test_one_process_may_shorten_rows(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 1, "max_norm=0.5", experiment=toy_experiments.tables)
    assert ended.codes == [0], ended.said


def test_rows_that_are_not_trained_come_out_the_same_everywhere() -> None:
    bag = torch.nn.EmbeddingBag(3, 2, max_norm=1.0)
    with pytest.raises(EchelonError, match="the model is an EmbeddingBag with max_norm=1"):
        require_no_max_norm(bag)
    require_no_max_norm(bag.requires_grad_(False))
