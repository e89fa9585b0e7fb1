"""Loader processes over many epochs: nothing grows, neither here nor in them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from echelon.data.batches import BatchOrder, DatasetSource
from echelon.data.sample_order import EpochOrder

CPU = torch.device("cpu")
SIZE, BATCH, WORKERS = 24, 3, 2
WARM_UP = 40
RSS_GROWTH_BYTES = 24 << 20
"""Of all processes together; a batch of every epoch would be more in 1,000 epochs."""


class Rows(Dataset[Any]):
    """Of changing sizes, so that blocks are made anew."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"row": torch.full((2000 + 100 * (index % 5),), index), "name": f"n{index}"}


def pad(samples: list[Any]) -> dict[str, Any]:
    rows = torch.nn.utils.rnn.pad_sequence([s["row"] for s in samples], batch_first=True)
    return {"row": rows, "name": [s["name"] for s in samples]}


class Held(NamedTuple):
    """What this process and its loader processes hold."""

    processes: int
    descriptors: int
    shared_maps: int
    shared_names: int
    rss_bytes: int


def count_held() -> Held:
    gc.collect()
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in processes]
    names = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]
    return Held(
        len(processes),
        sum(p.num_fds() for p in processes),
        sum(line.count("/dev/shm/") for line in maps),
        len(names),
        sum(p.memory_info().rss for p in processes),
    )


def make_order(epoch: int) -> EpochOrder:
    return EpochOrder(SIZE, BATCH, 0, 1, 0, epoch)


def make_next(order: BatchOrder) -> EpochOrder:
    return make_order(order.epoch + 1)


def run_epochs(source: DatasetSource, epochs: Iterator[int]) -> None:
    """Epochs one after the other; every eighth is left early, every ninth begins elsewhere."""
    for epoch in epochs:
        first = 2 if epoch % 9 == 0 else 0
        batches = source.iter_batches(make_order(epoch), first, CPU, make_next)
        for number, batch in enumerate(batches):
            data: Any = batch.data
            assert data["row"].shape[0] == BATCH
            if epoch % 8 == 0 and number == 3:
                break


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [60, pytest.param(1000, marks=pytest.mark.campaign)])
def test_nothing_grows_from_epoch_to_epoch(epochs: int) -> None:
    alone = count_held()
    source = DatasetSource(Rows(), WORKERS, collate_fn=pad)
    run_epochs(source, iter(range(WARM_UP)))
    before = count_held()
    assert before.processes == alone.processes + WORKERS
    run_epochs(source, iter(range(WARM_UP, WARM_UP + epochs)))
    after = count_held()
    source.close()
    end = count_held()
    assert after.processes == before.processes
    # How many blocks there are depends on who was ahead of whom, and is bounded.
    assert after.descriptors <= before.descriptors + 2 * 34 * WORKERS
    assert after.shared_maps <= 2 * 34 * WORKERS + alone.shared_maps
    assert after.shared_names == before.shared_names
    assert after.rss_bytes < before.rss_bytes + RSS_GROWTH_BYTES
    assert end.processes == alone.processes
    assert end.shared_names == alone.shared_names
    assert end.shared_maps <= alone.shared_maps + 2  # what was shared with the processes
    assert end.descriptors <= alone.descriptors + 8
