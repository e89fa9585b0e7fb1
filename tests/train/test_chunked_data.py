"""Data in chunks and samples that cannot be read: the same at any world size, with any number of
loader processes, and after a kill; data that has changed is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chunked_experiments import chunked, loop_over_chunks
from worlds import Trained, global_batches, losses, make_world_env, snapshot_steps, train_world

pytestmark = pytest.mark.slow

SHORT = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.save.steps=1", "trainer.log_steps=1")
SKIP = ("bad=[4,5,22]", "trainer.bad_samples=skip", "trainer.max_bad_samples=3")


def train(
    folder: Path,
    world_size: int,
    *words: str,
    name: str,
    fault: str = "",
    trace: bool = False,
    experiment: Callable[..., Any] = chunked,
    prepare: Callable[[int], None] | None = None,
) -> Trained:
    return train_world(
        folder,
        world_size,
        *(*SHORT, *words),
        name=name,
        experiment=experiment,
        env=make_world_env(folder, name, trace, fault),
        end_together=bool(fault),
        prepare=prepare,
    )


def read_bad_samples(trained: Trained) -> list[tuple[int, str, int]]:
    text = (trained.run.folder / "bad_samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return sorted((line["row"], line["place"], line["instead"]) for line in lines)


def test_skipped_samples_are_the_same_at_any_world_size_and_after_a_kill(tmp_path: Path) -> None:
    whole = train(tmp_path, 1, *SKIP, name="whole", trace=True)
    assert whole.codes == [0], whole.said
    listed = [
        (4, "part-0.tar, sample 4", 6),
        (5, "part-2.tar, sample 0", 6),
        (22, "part-5.tar, sample 5", 0),
    ]
    assert read_bad_samples(whole) == listed
    assert whole.said.count("warning: skipped a sample of train_data") == 3
    batches = global_batches(tmp_path / "trace-whole")
    for step in (0, 5, 10):
        rows = [row for batch in batches[step : step + 5] for row in batch]
        expected = [{4: 6, 5: 6, 22: 0}.get(row, row) for row in range(23)]
        assert sorted(rows) == sorted(expected)
    for world_size, workers in ((2, 2), (3, 0)):
        words = (*SKIP, f"trainer.loader_workers={workers}")
        other = train(tmp_path, world_size, *words, name=f"at-{world_size}", trace=True)
        assert set(other.codes) == {0}, other.said
        assert global_batches(tmp_path / f"trace-at-{world_size}") == batches
        assert losses(other.run) == pytest.approx(losses(whole.run), rel=1e-5)
        assert read_bad_samples(other) == listed
    killed = train(tmp_path, 2, *SKIP, name="killed", fault="0:7:KILL")
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    assert snapshot_steps(killed.run)
    resumed = train(tmp_path, 3, *SKIP, "trainer.loader_workers=2", name="killed")
    assert set(resumed.codes) == {0}, resumed.said
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
    assert read_bad_samples(resumed) == listed


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 2)])
def test_a_bad_sample_ends_the_run_with_its_place_and_a_resume_may_skip_it(
    tmp_path: Path, world_size: int, workers: int
) -> None:
    words = ("bad=[4]", f"trainer.loader_workers={workers}")
    failed = train(tmp_path, world_size, *words, name="failed")
    assert set(failed.codes) == {1}, failed.said
    said = "".join(rank.output for rank in failed.ranks)
    assert "train_data has a sample that cannot be read: part-0.tar, sample 4: it is cut" in said
    assert "after step" in said
    assert "Traceback" not in said
    resumed = train(tmp_path, world_size, *words, "trainer.bad_samples=skip", name="failed")
    assert set(resumed.codes) == {0}, resumed.said
    whole = train(tmp_path, 1, *words, "trainer.bad_samples=skip", name="whole")
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
    few = train(tmp_path, 1, *SKIP, "trainer.max_bad_samples=2", name="few")
    assert few.codes == [1]
    assert "trainer.max_bad_samples=2, but more samples of train_data" in few.said


@pytest.mark.parametrize("experiment", [chunked, loop_over_chunks])
def test_data_that_has_changed_since_the_snapshot_is_refused(
    tmp_path: Path, experiment: Callable[..., Any]
) -> None:
    first = train(tmp_path, 1, "trainer.epochs=1", name="run", experiment=experiment)
    assert first.codes == [0], first.said
    change = partial(train, tmp_path, prepare=use_larger_window, experiment=experiment)
    refused = change(2, name="run")
    assert refused.codes == [2, 2], refused.said
    said = "".join(rank.output for rank in refused.ranks)
    assert "train_data has changed since the snapshot of step 5: window_bytes=110, not 80" in said
    assert "trainer.resume=never" in said
    [newest] = first.run.snapshots_folder.glob("step-*5")
    taken = change(1, f"trainer.resume={newest}", name="taken")
    assert taken.codes == [0], taken.said
    assert "note: train_data is not laid out as it was for the snapshot: window_byt" in taken.said


def test_ranks_with_other_chunks_are_refused(tmp_path: Path) -> None:
    refused = train(tmp_path, 2, name="run", prepare=use_larger_window_on_rank_1)
    assert refused.codes[1] == 2, refused.said
    said = "".join(rank.output for rank in refused.ranks)
    assert "the layout of the data is not the same on all ranks: window_bytes=110, not 80" in said
    assert "give all ranks the same files in the same order" in said


def use_larger_window(rank: int) -> None:
    os.environ["ECHELON_TEST_WINDOW_BYTES"] = "110"


def use_larger_window_on_rank_1(rank: int) -> None:
    if rank == 1:
        use_larger_window(rank)
