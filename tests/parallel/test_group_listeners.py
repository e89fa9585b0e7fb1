"""Ports that gloo has opened take nobody once the group is whole; other groups go on as before."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from worlds import join_gloo_group, spawn_world

pytestmark = pytest.mark.slow
WORLD_SIZE = 3


def list_own_listeners() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def is_answered(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=0.3).close()
    except TimeoutError:
        return False
    return True


def use_groups(rank: int, master: str) -> list[float]:
    group = join_gloo_group(rank, WORLD_SIZE, master)
    of_group = {each for each in list_own_listeners() if each[1] != int(master.split(":")[1])}
    assert of_group
    assert not any(is_answered(each) for each in of_group)
    sums = [torch.tensor([float(rank)]) for _ in range(2)]
    dist.all_reduce(sums[0])
    dist.all_reduce(sums[1], group=dist.new_group())
    group.barrier_before_exit()
    return [float(each) for each in sums]


def test_a_group_that_is_whole_takes_nobody(tmp_path: Path) -> None:
    ranks = spawn_world(WORLD_SIZE, use_groups, tmp_path)
    assert [rank.code for rank in ranks] == [0] * WORLD_SIZE, [rank.output for rank in ranks]
    assert [rank.value for rank in ranks] == [[3.0, 3.0]] * WORLD_SIZE
