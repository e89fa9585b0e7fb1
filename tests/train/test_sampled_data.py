"""Random samples, samplers and own batches: the same numbers at any world size, with any number of
loader processes, and after any resume."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from sampled_experiments import sampled
from worlds import (
    Trained,
    differing,
    global_batches,
    losses,
    make_world_env,
    metrics,
    snapshot_steps,
    state_at,
    train_world,
)

pytestmark = pytest.mark.slow

SHORT = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.save.steps=1")


def train(
    folder: Path, world_size: int, *words: str, name: str, trace: bool = False, fault: str = ""
) -> Trained:
    return train_world(
        folder,
        world_size,
        *(*SHORT, *words),
        name=name,
        experiment=sampled,
        env=make_world_env(folder, f"{name}-{world_size}", trace, fault),
        end_together=bool(fault),
    )


def require_finished(trained: Trained) -> Trained:
    assert set(trained.codes) == {0}, trained.said
    return trained


def kill_and_resume(
    folder: Path, worlds: Sequence[int], *words: str, name: str, step: int
) -> Trained:
    """Killed after so many steps, then continued at another world size."""
    killed = train(folder, worlds[0], *words, name=name, fault=f"0:{step}:KILL")
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    assert snapshot_steps(killed.run), "the kill came after a save"
    return require_finished(train(folder, worlds[1], *words, name=name))


def test_augmentation_does_not_depend_on_processes_or_kills(tmp_path: Path) -> None:
    """With dropout, whose numbers are the training process's own, and loader processes that draw
    theirs."""
    whole = require_finished(train(tmp_path, 1, "dropout=0.3", name="whole"))
    for workers, step in ((0, 6), (2, 3)):
        words = ("dropout=0.3", f"trainer.loader_workers={workers}")
        resumed = kill_and_resume(tmp_path, (1, 1), *words, name=f"with-{workers}", step=step)
        assert metrics(resumed.run) == metrics(whole.run)
        assert differing(state_at(resumed.run, 12), state_at(whole.run, 12)) == []


@pytest.mark.parametrize("order", ["shuffled", "weighted", "buckets", "growing"])
def test_curves_and_batches_are_the_same_at_any_world_size(tmp_path: Path, order: str) -> None:
    words = (f"order={order}",)
    whole = require_finished(train(tmp_path, 1, *words, name="whole", trace=True))
    which = "the batch_sampler" if order == "buckets" else "5"
    assert f"samples in batches of {which} on one process" in whole.said
    batches = global_batches(tmp_path / "trace-whole-1")
    assert len(losses(whole.run)) == len(batches)
    other = require_finished(
        train(tmp_path, 3, *words, "trainer.loader_workers=1", name="other", trace=True)
    )
    assert global_batches(tmp_path / "trace-other-3") == batches
    assert losses(other.run) == pytest.approx(losses(whole.run), rel=1e-5)
    resumed = kill_and_resume(tmp_path, (2, 3), *words, name="resumed", step=len(batches) // 2)
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
    assert [line["epoch"] for line in metrics(resumed.run)] == [
        line["epoch"] for line in metrics(whole.run)
    ]


def test_a_dataclass_is_accumulated_and_a_graph_refused(tmp_path: Path) -> None:
    whole = require_finished(train(tmp_path, 1, name="whole"))
    cut = require_finished(
        train(tmp_path, 2, "batch=dataclass", "trainer.accumulate=2", name="cut")
    )
    assert losses(cut.run) == pytest.approx(losses(whole.run), rel=1e-5)
    noticed = require_finished(
        train(tmp_path, 1, "batch=dataclass", "sums=true", "trainer.steps=1", name="sums")
    )
    assert "is the sum of the losses of its halves" in noticed.said
    graphs = require_finished(train(tmp_path, 1, "batch=graph", name="graphs"))
    assert losses(graphs.run) == losses(whole.run)
    refused = train(tmp_path, 1, "batch=graph", "trainer.accumulate=2", name="refused")
    assert refused.codes == [1]
    assert "a batch is a Graphs, which cannot be cut into pieces of its 5 samples" in refused.said
    assert "Traceback" not in refused.said


def test_a_sampler_that_gives_shares_is_refused(tmp_path: Path) -> None:
    refused = train(tmp_path, 2, "order=shares", name="shares")
    assert refused.codes == [2, 2], refused.said
    said = "".join(rank.output for rank in refused.ranks)
    assert "the order of the sampler is not the same on all ranks" in said
    assert "every rank cuts out its own share" in said


@pytest.mark.parametrize(("order", "world_size"), [("buckets", 2), ("weighted", 1)])
def test_a_sample_that_is_not_finite_is_found_in_any_order(
    tmp_path: Path, order: str, world_size: int
) -> None:
    """The share of the step is read again: the same samples, with the same random numbers."""
    failed = train(tmp_path, world_size, f"order={order}", "bad_sample=4", name="bad")
    assert set(failed.codes) == {1}, failed.said
    assert "sample 4 of train_data has inf in element 1" in failed.said
