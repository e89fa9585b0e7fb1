"""What a model keeps beside its parameters, such as averages of batches, is as it would be with one
process and a plain loop."""

from __future__ import annotations

from pathlib import Path

import batchnorm_model
import pytest
import torch
from random_experiments import random_experiment
from worlds import differing, metrics, train_world

import echelon
from echelon.runs.run_folder import Run

pytestmark = pytest.mark.slow

FSDP = "replica.kind=fsdp"
WORDS = ("trainer.batch_size=8", "trainer.epochs=2", "trainer.eval_batch_size=2")


def train_model(folder: Path, *words: str, name: str = "a") -> Run:
    ended = train_world(folder, 2, *WORDS, *words, name=name, experiment=batchnorm_model.normed)
    assert ended.codes == [0, 0], ended.said
    return ended.run


@pytest.mark.parametrize("how", ["replica.kind=ddp", FSDP, "replica.devices=2"])
@pytest.mark.parametrize("samples", [7, 2])  # with two, a rank has none
def test_what_is_evaluated_is_the_model_that_is_saved(
    tmp_path: Path, how: str, samples: int
) -> None:
    run = train_model(tmp_path, how, f"eval_samples={samples}")
    saved = batchnorm_model.normed(batchnorm_model.Settings(eval_samples=samples))
    saved.model.load_state_dict(echelon.load_weights(run.folder))
    saved.model.eval()
    x, y = saved.eval_data
    with torch.no_grad():
        loss = saved.loss(saved.model(x), y).item()
    assert metrics(run)[-1]["eval_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("how", ["replica.kind=ddp", FSDP])
def test_recomputing_leaves_averages_as_they_are(tmp_path: Path, how: str) -> None:
    plain = train_model(tmp_path, how, name="plain")
    again = train_model(tmp_path, how, "replica.checkpoint=true", name="again")
    assert metrics(again) == metrics(plain)
    assert differing(echelon.load_weights(again.folder), echelon.load_weights(plain.folder)) == []


@pytest.mark.parametrize("how", ["replica.kind=ddp", FSDP, "replica.devices=2"])
def test_a_frozen_layer_in_eval_mode_stays_as_it_is(tmp_path: Path, how: str) -> None:
    run = train_model(tmp_path, how, "frozen=true", "trainer.evaluate.steps=2")
    assert sum("eval_loss" in line for line in metrics(run)) == 4
    found = echelon.load_weights(run.folder)
    assert [int(found[f"{i}.1.num_batches_tracked"]) for i in (0, 1)] == [0, 8]
    assert torch.equal(found["0.1.running_mean"], torch.zeros(8))


@pytest.mark.parametrize("how", ["replica.kind=ddp", FSDP])
def test_buffers_follow_a_last_batch_of_fewer_samples_than_ranks(tmp_path: Path, how: str) -> None:
    """Buffers are rank 0's, so it must be another rank that sees no sample."""
    words = ("kind=buffers", "samples=7", "trainer.batch_size=4", "trainer.epochs=1")
    saved = []
    for size, word in ((1, "replica.kind=ddp"), (4, how)):
        ended = train_world(
            tmp_path, size, *words, word, name=f"of-{size}", experiment=random_experiment
        )
        assert ended.codes == [0] * size, ended.said
        saved.append(echelon.load_weights(ended.run.folder))
    sizes = [name for name in saved[0] if name.endswith(".size")]
    assert len(sizes) == 2
    for name in sizes:
        torch.testing.assert_close(saved[1][name], saved[0][name], rtol=1e-6, atol=0.0)
