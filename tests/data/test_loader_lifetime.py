"""A loader process ends with its rank, also where torch would not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from worlds import members, spawn_world, wait_until

from echelon.data.batches import DatasetSource
from echelon.data.sample_order import EpochOrder


class Endless(Dataset[int]):
    """A sample that never comes: its process does not look for its parent."""

    def __init__(self, began: Path) -> None:
        self.began = began

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.began.touch()
        while True:
            time.sleep(60.0)


def read_until_killed(rank: int, master: str, began: Path) -> None:
    source = DatasetSource(Endless(began), workers=2)
    next(source.iter_batches(EpochOrder(8, 2, 0, 1, 0, 0), 0, torch.device("cpu")))


@pytest.mark.slow
def test_a_loader_process_in_the_middle_of_a_sample_ends_with_its_rank(tmp_path: Path) -> None:
    began = tmp_path / "began"

    def kill(pids: Sequence[int]) -> None:
        wait_until(began.exists, "a sample is being fetched")
        assert len(members(pids)) >= 2
        os.kill(pids[0], signal.SIGKILL)

    # This waits until no process of the rank is left.
    [ended] = spawn_world(1, partial(read_until_killed, began=began), tmp_path, interrupt=kill)
    assert ended.code == -signal.SIGKILL
