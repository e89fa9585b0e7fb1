"""A share of a batch, computed in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from echelon.parallel.replica import split_microbatches


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [3, 2]), (4, [2, 1, 1, 1])])
def test_whatever_a_dataset_collates_is_cut_by_samples(count: int, sizes: list[int]) -> None:
    names, ids = [f"sample {i}" for i in range(5)], torch.arange(5)
    samples = [{"name": names[i], "both": (names[i], [ids[i], ids[i] * 2.0])} for i in range(5)]
    data = default_collate(samples)
    found = split_microbatches(data, 5, count)
    assert [size for _, size in found] == sizes
    pieces: list[Any] = [piece for piece, _ in found]
    assert [name for piece in pieces for name in piece["name"]] == names
    assert [name for piece in pieces for name in piece["both"][0]] == names
    for place, whole in enumerate((ids, ids * 2.0)):
        assert torch.equal(torch.cat([piece["both"][1][place] for piece in pieces]), whole)


def test_there_are_as_many_pieces_as_on_other_ranks() -> None:
    assert split_microbatches(None, 0, 3) == [(None, 0)] * 3
    assert [size for _, size in split_microbatches((torch.ones(2),), 2, 3)] == [1, 1, 0]
    assert split_microbatches((torch.ones(2),), 2, 3)[-1] == (None, 0)
