"""Training from files: the same numbers from any format, at any world size, after any kill."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from file_experiment import ROWS, from_files, write_training_files
from worlds import Trained, global_batches, losses, train_world

pytestmark = pytest.mark.slow


def train(folder: Path, world_size: int, *words: str, name: str, fault: str = "") -> Trained:
    traces = folder / f"trace-{name}-{world_size}"
    traces.mkdir()
    env = {"ECHELON_TEST_TRACE": str(traces)}
    return train_world(
        folder,
        world_size,
        *("trainer.batch_size=5", "trainer.epochs=3", "trainer.save.steps=1", *words),
        name=name,
        experiment=from_files,
        env={**env, "ECHELON_TEST_FAULT": fault} if fault else env,
        end_together=bool(fault),
    )


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_give_the_same_numbers_at_any_world_size_and_after_kills(
    tmp_path: Path, kind: str
) -> None:
    write_training_files(tmp_path / "data")
    words = (f"path={tmp_path / 'data' / kind}",)
    whole = train(tmp_path, 1, *words, name="whole")
    assert set(whole.codes) == {0}, whole.said
    batches = global_batches(tmp_path / "trace-whole-1")
    for epoch in (batches[:4], batches[4:8], batches[8:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(ROWS))
    for first, then in ((2, 3), (3, 1)):
        name = f"killed-{first}"
        killed = train(tmp_path, first, *words, name=name, fault="0:6:KILL")
        assert killed.codes[0] == -signal.SIGKILL, killed.said
        resumed = train(tmp_path, then, *words, "trainer.loader_workers=1", name=name)
        assert set(resumed.codes) == {0}, resumed.said
        assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
        assert global_batches(tmp_path / f"trace-{name}-{first}")[:6] == batches[:6]


def test_batches_of_columns_give_the_same_numbers(tmp_path: Path) -> None:
    """Without a transform, a Parquet file is read as columns, and lines of JSON one by one."""
    write_training_files(tmp_path / "data")
    curves = []
    for world_size, kind in ((1, "jsonl"), (2, "parquet")):
        words = (f"path={tmp_path / 'data' / kind}", "noise=false")
        trained = train(tmp_path, world_size, *words, name=kind)
        assert set(trained.codes) == {0}, trained.said
        curves.append(losses(trained.run))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
