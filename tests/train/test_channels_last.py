"""`trainer.channels_last`: the curve of any run, at any world size and through a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from picture_experiment import pictures
from worlds import losses, train_world

pytestmark = pytest.mark.slow

WORDS = ("trainer.batch_size=6", "trainer.log_steps=1", "trainer.epochs=null")


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_the_curve_is_that_of_a_run_without(tmp_path: Path, optimizer: str) -> None:
    def train(name: str, world_size: int, *words: str) -> list[float]:
        words = (*WORDS, f"optimizer={optimizer}", *words)
        ended = train_world(tmp_path, world_size, *words, name=name, experiment=pictures)
        assert ended.codes == [0] * world_size, ended.said
        return losses(ended.run)

    expected = train("plain", 1, "trainer.steps=8")
    assert len(expected) == 8
    on = "trainer.channels_last=true"
    assert train("whole", 1, on, "trainer.steps=8") == pytest.approx(expected, rel=1e-4)
    train("resumed", 2, on, "trainer.steps=4")
    assert train("resumed", 3, on, "trainer.steps=8") == pytest.approx(expected, rel=1e-4)
