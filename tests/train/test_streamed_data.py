"""Streams: the same numbers at any world size, with any number of loader processes, and after any
resume."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from streamed_experiments import streamed, streamed_loop, streamed_step
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

SHORT = ("trainer.batch_size=6", "trainer.steps=24", "trainer.save.steps=1")
KINDS: dict[str, Callable[..., Any]] = {
    "loss": streamed,
    "step": streamed_step,
    "loop": streamed_loop,
}


def train(
    folder: Path,
    world_size: int,
    *words: str,
    name: str,
    of: str = "loss",
    trace: bool = False,
    fault: str = "",
) -> Trained:
    return train_world(
        folder,
        world_size,
        *(*SHORT, *words),
        name=name,
        experiment=KINDS[of],
        env=make_world_env(folder, name, trace, fault),
        end_together=bool(fault),
    )


def require_finished(trained: Trained) -> Trained:
    assert set(trained.codes) == {0}, trained.said
    return trained


def kill_and_resume(
    folder: Path, worlds: Sequence[int], *words: str, name: str, of: str, step: int
) -> Trained:
    killed = train(folder, worlds[0], *words, name=name, of=of, fault=f"0:{step}:KILL")
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    assert snapshot_steps(killed.run), "the kill came after a save"
    return require_finished(train(folder, worlds[1], *words, name=name, of=of))


@pytest.mark.parametrize(
    ("of", "kind", "workers"),
    [
        ("loss", "stateful", 0),
        ("loss", "plain", 2),
        ("step", "iterator", 0),
        ("loop", "stateful", 2),
    ],
)
def test_the_numbers_do_not_depend_on_processes_or_kills(
    tmp_path: Path, of: str, kind: str, workers: int
) -> None:
    words: tuple[str, ...] = (f"kind={kind}",)
    whole = require_finished(train(tmp_path, 1, *words, name="whole", of=of, trace=True))
    assert "24 steps over a stream of 4 shards in batches of 6 on one process" in whole.said
    assert "note" not in whole.said
    if of == "loss":
        assert [line["step"] for line in metrics(whole.run) if "eval_loss" in line] == [24]
    batches = global_batches(tmp_path / "trace-whole")
    assert len(batches) == len(losses(whole.run)) == 24
    words += (f"trainer.loader_workers={workers}",)
    other = require_finished(train(tmp_path, 3, *words, name="other", of=of, trace=True))
    assert global_batches(tmp_path / "trace-other") == batches
    assert losses(other.run) == pytest.approx(losses(whole.run), rel=1e-5)
    assert "the 4 shards of" in other.said
    resumed = kill_and_resume(tmp_path, (2, 3), *words, name="resumed", of=of, step=20)
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
    assert ("samples are read again and dropped" in resumed.said) == (kind == "plain")


@pytest.mark.parametrize(("of", "workers"), [("loss", 2), ("loop", 0)])
def test_one_process_resumes_to_the_bit(tmp_path: Path, of: str, workers: int) -> None:
    """With dropout, whose numbers are the training process's own."""
    words: tuple[str, ...] = ("dropout=0.3", "kind=stateful")
    whole = require_finished(train(tmp_path, 1, *words, name="whole", of=of))
    words += (f"trainer.loader_workers={workers}",)
    resumed = kill_and_resume(tmp_path, (1, 1), *words, name="resumed", of=of, step=19)
    assert metrics(resumed.run) == metrics(whole.run)
    ours, theirs = state_at(resumed.run, 24), state_at(whole.run, 24)
    positions = ours.pop("stream")["shards"], theirs.pop("stream")["shards"]
    assert differing(ours, theirs) == []
    if not workers:  # their states are older than the position
        assert differing(*positions) == []


def test_a_stream_that_is_not_cut(tmp_path: Path) -> None:
    whole = require_finished(train(tmp_path, 1, "shards=1", name="whole", of="loop"))
    other = require_finished(train(tmp_path, 2, "shards=1", name="other", of="loop"))
    assert losses(other.run) == pytest.approx(losses(whole.run), rel=1e-5)
    assert "each of 2 processes reads all of it" in other.said
    assert "each of 2 processes reads all of it" not in other.ranks[1].output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_raises_is_named(tmp_path: Path, workers: int) -> None:
    words = ("kind=raising", f"trainer.loader_workers={workers}")
    failed = train(tmp_path, 2, *words, name="failed")
    assert set(failed.codes) == {1}, failed.said
    assert "ValueError: a line that is no JSON" in failed.said
    assert "in shard 3 of 4 of train_data: it failed at sample 5 of pass 1" in failed.said
    assert "rank 1" in failed.said
    if not workers:  # loader processes are ahead
        assert "step 3" in failed.said


@pytest.mark.parametrize(
    ("of", "words", "parts"),
    [
        ("loss", ("kind=empty",), ("shard 2 of 4 of train_data gives no samples", "fewer shards")),
        ("loss", ("trainer.steps=null",), ("train_data is a stream", "set trainer.steps")),
        ("loop", ("trainer.steps=null",), ("data is a stream", "steps=…")),
        ("loss", ("trainer.save.epochs=2",), ("trainer.save.epochs=2", "trainer.save.steps")),
        ("loop", ("every_epochs=1",), ("session.every(epochs=1)", "session.every(steps=…)")),
        ("loss", ("kind=unsavable",), ("builtins.object at stream/shard 0", "dict, list")),
        ("loss", ("kind=of_ranks",), ("2 shards of a stream here, 1 on rank 0",)),
        (
            "loop",
            ("kind=divided", "shards=1", "trainer.loader_workers=1"),
            ("shard 0 of data gives rank 1 another first sample than rank 0", "leave out"),
        ),
    ],
)
def test_what_a_stream_cannot_do_is_said(
    tmp_path: Path, of: str, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused = train(tmp_path, 2, *words, name="refused", of=of)
    said = "".join(rank.output for rank in refused.ranks)
    assert all(refused.codes), said
    assert "Traceback" not in said, said
    for part in parts:
        assert part in said, said
    assert not snapshot_steps(refused.run)


def test_other_data_does_not_go_on(tmp_path: Path) -> None:
    require_finished(train(tmp_path, 1, "trainer.steps=2", name="a"))
    snapshot = tmp_path / "a" / "snapshots" / "step-000000002"
    refused = train(tmp_path, 1, "shards=3", f"trainer.resume={snapshot}", name="b")
    assert refused.codes == [2], refused.said
    assert "trained with a stream of 4 shards, and the data is now a stream of 3" in refused.said
