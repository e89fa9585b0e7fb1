"""Parameters that are frozen and thawed in the midst of a training, on any number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from thawing_experiment import ThawingSettings, thawing, thawing_tables
from worlds import differing, losses, spawn_world, state_at, train_world

from echelon.data.sample_order import map_positions

pytestmark = pytest.mark.slow

BATCH, EPOCHS, SAMPLES = 4, 3, 17
WORDS = (f"trainer.batch_size={BATCH}", f"trainer.epochs={EPOCHS}")


def train_by_hand(rank: int, master: str, cfg: ThawingSettings) -> list[float]:
    """The plain loop of one process, in which what is frozen has no gradient."""
    torch.manual_seed(0)
    parts = thawing(cfg)
    curve = []
    for epoch in range(EPOCHS):
        order = map_positions(torch.arange(SAMPLES), SAMPLES, seed=0, epoch=epoch)
        for rows in order.split(BATCH):
            x, y = (t[rows] for t in parts.train_data)
            loss = parts.loss(parts.model(x), y)
            parts.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
            parts.optimizer.step()
            assert parts.schedule is not None
            parts.schedule.step()
            curve.append(loss.item())
    return curve


@pytest.mark.parametrize(
    ("where", "thaw", "freeze", "accumulate", "optimizer"),
    [
        # 5 steps an epoch; the last of each has one sample, so that other ranks have none.
        ("forward", 3, 1000, 1, "momentum"),
        ("forward", 4, 7, 2, "adam"),  # thawed where only rank 0 calls the model
        ("schedule", 4, 8, 1, "momentum"),
        ("schedule", 2, 2, 2, "adam"),  # both in one step
    ],
)
def test_what_is_thawed_later_is_trained_as_in_a_plain_loop(
    tmp_path: Path, where: str, thaw: int, freeze: int, accumulate: int, optimizer: str
) -> None:
    cfg = ThawingSettings(where=where, thaw_step=thaw, freeze_step=freeze, optimizer=optimizer)
    [plain] = spawn_world(1, partial(train_by_hand, cfg=cfg), tmp_path / "by-hand")
    assert plain.code == 0, plain.output
    words = (
        *WORDS,
        f"where={where}",
        f"thaw_step={thaw}",
        f"freeze_step={freeze}",
        f"optimizer={optimizer}",
        f"trainer.accumulate={accumulate}",
        "trainer.clip=1.0",
    )
    for world_size in (1, 2, 3):
        ended = train_world(
            tmp_path, world_size, *words, name=f"of-{world_size}", experiment=thawing
        )
        assert ended.codes == [0] * world_size, ended.said
        assert losses(ended.run) == pytest.approx(plain.value, rel=1e-6), f"{world_size} processes"


def test_parameters_of_an_embedding_are_thawed_too(tmp_path: Path) -> None:
    """Such gradients are exchanged by rows and not by DDP."""
    curves: list[Any] = []
    for world_size in (1, 3):
        ended = train_world(
            tmp_path, world_size, *WORDS, name=f"of-{world_size}", experiment=thawing_tables
        )
        assert ended.codes == [0] * world_size, ended.said
        curves.append(losses(ended.run))
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[0][-1] < 0.8 * curves[0][0], "the table is trained"


@pytest.mark.parametrize(("where", "freeze"), [("forward", 1000), ("schedule", 6)])
def test_a_run_that_was_killed_goes_on_with_what_was_thawed(
    tmp_path: Path, where: str, freeze: int
) -> None:
    """Even where the experiment itself would begin anew with a frozen body: its own count of steps
    is not in the snapshot."""
    words = (*WORDS, f"where={where}", f"freeze_step={freeze}", "trainer.save.steps=2")
    whole = train_world(tmp_path, 2, *words, name="whole", experiment=thawing)
    assert whole.codes == [0, 0], whole.said
    env = {"ECHELON_TEST_FAULT": "1:9:KILL"}
    killed = train_world(
        tmp_path, 2, *words, name="killed", experiment=thawing, env=env, end_together=True
    )
    assert -9 in killed.codes
    again = train_world(
        tmp_path, 2, *words, "trainer.resume=auto", name="killed", experiment=thawing
    )
    assert again.codes == [0, 0], again.said
    assert losses(again.run) == losses(whole.run)
    assert differing(state_at(again.run, 15), state_at(whole.run, 15)) == []


@pytest.mark.parametrize("where", ["forward", "schedule"])
def test_a_sharded_model_refuses_by_name(tmp_path: Path, where: str) -> None:
    ended = train_world(
        tmp_path, 2, *WORDS, "replica.kind=fsdp", f"where={where}", experiment=thawing
    )
    assert 1 in ended.codes, ended.codes
    assert "froze or thawed the parameters body.0.weight, body.0.bias during" in ended.said
    assert "Traceback" not in ended.said
