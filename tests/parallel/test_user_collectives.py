"""Collectives in the loss of an experiment, where processes have shares of different sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gathering_experiment import gathering
from worlds import losses, train_world

import echelon

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("has_table", [False, True])
def test_a_rank_without_a_sample_takes_part(tmp_path: Path, has_table: bool) -> None:
    """Seven samples in batches of six: ranks 1 and 2 have none of the last. The spare sample that
    they compute leaves no trace, not even in an optimizer that counts the steps of a row."""
    words = ("trainer.batch_size=6", "trainer.epochs=3", f"has_table={has_table}")
    one, three = (
        train_world(tmp_path, n, *words, name=f"of-{n}", experiment=gathering) for n in (1, 3)
    )
    assert one.codes == [0], one.said
    assert three.codes == [0, 0, 0], three.said
    assert losses(three.run) == pytest.approx(losses(one.run), rel=1e-6)
    weights, expected = (echelon.load_weights(t.run.folder) for t in (three, one))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        (("trainer.batch_size=5",), "(3,) on rank 0 and (2,) on rank 1, as a batch of 5 samples"),
        (("trainer.batch_size=4",), "(2,) on rank 0 and (1,) on rank 1, as a batch of 3 samples"),
    ],
)
def test_shares_of_different_sizes_are_named(
    tmp_path: Path, words: tuple[str, ...], shapes: str
) -> None:
    ended = train_world(tmp_path, 2, *words, experiment=gathering)
    assert set(ended.codes) == {1}, ended.codes
    assert f"exchanges tensors of different shapes between its processes: {shapes}" in ended.said
    assert "hint: pad them" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.parametrize(("samples", "codes"), [(10, {1}), (8, {0})])
def test_an_evaluation_that_is_not_shared_evenly_is_named(
    tmp_path: Path, samples: int, codes: set[int]
) -> None:
    """Before the first step; else rank 0 would wait in its second batch for rank 1."""
    words = ("trainer.batch_size=2", "trainer.epochs=1", "samples=12", f"eval_samples={samples}")
    ended = train_world(tmp_path, 2, *words, experiment=gathering)
    assert set(ended.codes) == codes, ended.said
    refused = "10 samples in batches of 2 cannot be shared evenly by 2 processes" in ended.said
    assert refused == (codes == {1})
    assert "Traceback" not in ended.said
