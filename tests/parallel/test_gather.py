"""Rows of any length, of all ranks, on rank 0."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import spawn_world

from echelon.parallel.process_group import RankGroup
from echelon.world.detect import detect

pytestmark = pytest.mark.slow
WORLD_SIZE = 3
LENGTHS = [(0, 1, 2), (128, 0, 128), (127, 129, 3), (5000, 0, 700)]
"""In numbers of 8 bytes: rows of up to 128 of them travel at once."""


def gather_rows(rank: int, master: str, lengths: tuple[int, ...]) -> list[list[float]]:
    host, port = master.split(":")
    store = dist.TCPStore(
        host, int(port), WORLD_SIZE, is_master=rank == 0, timeout=timedelta(seconds=60)
    )
    world = detect({}, rank=rank, world_size=WORLD_SIZE, master=master, visible_devices=0).world
    group = RankGroup(world, store, rank == 0, 60.0)
    group.init_process_group("gloo")
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
