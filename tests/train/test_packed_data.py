"""Packed documents and batches under a token budget: the same batches and losses at any world size,
with any number of loader processes, and after a kill; another packing is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packed_experiments import loop_over_packed, packed, write_documents
from worlds import Trained, global_batches, losses, make_world_env, snapshot_steps, train_world

pytestmark = pytest.mark.slow

SHORT = ("trainer.batch_size=5", "trainer.epochs=2", "trainer.save.steps=1", "trainer.log_steps=1")


def train(
    folder: Path,
    world_size: int,
    *words: str,
    name: str,
    fault: str = "",
    trace: bool = False,
    experiment: Callable[..., Any] = packed,
) -> Trained:
    file = folder / "tokens.bin"
    if not file.exists():
        write_documents(file)
    return train_world(
        folder,
        world_size,
        *(*SHORT, f"file={file}", *words),
        name=name,
        experiment=experiment,
        env=make_world_env(folder, name, trace, fault),
        end_together=bool(fault),
    )


@pytest.mark.parametrize("strategy", ["concatenate", "best_fit", "budget"])
def test_losses_are_the_same_at_any_world_size_and_after_a_kill(
    tmp_path: Path, strategy: str
) -> None:
    """Means over tokens that are no padding, of which shares have unequal numbers."""
    words = (f"strategy={strategy}",)
    whole = train(tmp_path, 1, *words, name="whole", trace=True)
    assert whole.codes == [0], whole.said
    batches = global_batches(tmp_path / "trace-whole")
    assert len(losses(whole.run)) == len(batches) >= 8
    half = len(batches) // 2
    first, second = (sorted(chain(*epoch)) for epoch in (batches[:half], batches[half:]))
    assert first == second, "every epoch has all samples"
    for world_size, workers in ((2, 0), (3, 1)):
        other = train(
            tmp_path,
            world_size,
            *(*words, f"trainer.loader_workers={workers}"),
            name=f"at-{workers}",
            trace=True,
        )
        assert set(other.codes) == {0}, other.said
        assert global_batches(tmp_path / f"trace-at-{workers}") == batches
        assert losses(other.run) == pytest.approx(losses(whole.run), rel=1e-5)
    killed = train(tmp_path, 2, *words, name="killed", fault=f"0:{half + 1}:KILL")
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    assert snapshot_steps(killed.run)
    resumed = train(tmp_path, 3, *words, name="killed")
    assert set(resumed.codes) == {0}, resumed.said
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)


@pytest.mark.parametrize("strategy", ["best_fit", "budget"])
def test_a_loop_of_ones_own_and_another_packing(tmp_path: Path, strategy: str) -> None:
    """The loop has the losses of the experiment; data that is packed otherwise is refused."""
    words = (f"strategy={strategy}", "trainer.epochs=1")
    whole = train(tmp_path, 1, *words, name="whole")
    looped = train(tmp_path, 3, *words, name="loop", experiment=loop_over_packed)
    assert set(looped.codes) == {0}, looped.said
    assert losses(looped.run) == pytest.approx(losses(whole.run), rel=1e-5)
    write_documents(tmp_path / "tokens.bin", documents=36)
    refused = train(tmp_path, 1, words[0], name="whole")
    assert refused.codes == [2], refused.said
    said = "36 samples of " if strategy == "budget" else "samples of 8 tokens from "
    assert f"since the snapshot of step {len(losses(whole.run))}: it has {said}" in refused.said
