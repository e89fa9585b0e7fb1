"""Rows of any length, of all ranks, on rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from worlds import join_gloo_group, spawn_world

pytestmark = pytest.mark.slow
WORLD_SIZE = 3
LENGTHS = [(0, 1, 2), (128, 0, 128), (127, 129, 3), (5000, 0, 700)]
"""In numbers of 8 bytes: rows of up to 128 of them travel at once."""


def gather_rows(rank: int, master: str, lengths: tuple[int, ...]) -> list[list[float]]:
    group = join_gloo_group(rank, WORLD_SIZE, master)
    row = torch.arange(lengths[rank], dtype=torch.float64) + rank / 4
    gathered = group.gather(row)
    group.barrier_before_exit()
    return [of_rank.tolist() for of_rank in gathered]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_of_unequal_lengths(lengths: tuple[int, ...], tmp_path: Path) -> None:
    ranks = spawn_world(WORLD_SIZE, partial(gather_rows, lengths=lengths), tmp_path)
    assert [rank.code for rank in ranks] == [0] * WORLD_SIZE, [rank.output for rank in ranks]
    expected = [[n + rank / 4 for n in range(length)] for rank, length in enumerate(lengths)]
    assert [rank.value for rank in ranks] == [expected, [], []]
