"""Every sample exactly once in an epoch, in one global order: at 1 to 5 ranks, with 0 to 3 loader
processes each, of files whose numbers of samples no batch divides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data_experiments import (
    MIXED_OFFSET,
    SAMPLES,
    WRITERS,
    ShuffledBuckets,
    open_data,
    write_data,
)

from echelon.data.batches import DatasetSource
from echelon.data.epoch_plan import EpochPlan, make_epoch_plan

CPU = torch.device("cpu")
BATCH_SIZE = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def read_epoch(
    source: DatasetSource, plan: EpochPlan, world_size: int, epoch: int, first: int = 0
) -> list[list[int]]:
    """The samples of every batch from the first on, the ranks' shares joined."""
    shares = []
    for rank in range(world_size):
        batches = source.iter_batches(plan.make_order(epoch, rank, world_size, CPU), first, CPU)
        shares.append([batch.data[0].tolist() if batch.data else [] for batch in batches])
    return [[number for share in parts for number in share] for parts in zip(*shares, strict=True)]


def make_source(kind: str, folder: Path, workers: int) -> tuple[DatasetSource, EpochPlan]:
    data = open_data(kind, folder)
    batch_sampler = ShuffledBuckets() if kind == "batch_sampler" else None
    plan = make_epoch_plan(len(data), BATCH_SIZE, 0, None, batch_sampler, data)
    return DatasetSource(data, workers), plan


def require_once(kind: str, batches: list[list[int]]) -> None:
    numbers = sorted(number for batch in batches for number in batch)
    if kind != "mixture":
        assert numbers == [*range(SAMPLES)]
        return
    first, second = (
        [n % MIXED_OFFSET for n in numbers if (n >= MIXED_OFFSET) == is_second]
        for is_second in (False, True)
    )
    # An epoch has as many draws as there are samples: 62, of which 70 % are of the first source.
    assert (len(first), len(second)) == (43, 19)
    assert set(first) == {*range(SAMPLES)}
    assert len(set(second)) == 19


@pytest.mark.parametrize("kind", [*WRITERS, "mixture", "batch_sampler"])
@pytest.mark.slow
def test_at_any_number_of_ranks(folder: Path, kind: str) -> None:
    source, plan = make_source(kind, folder, workers=0)
    whole = read_epoch(source, plan, 1, epoch=0)
    require_once(kind, whole)
    for world_size in (2, 3, 4, 5):
        assert read_epoch(source, plan, world_size, epoch=0) == whole
    assert read_epoch(source, plan, 4, 0, first=3) == whole[3:], "as after a resume there"
    other = read_epoch(source, plan, 3, epoch=1)
    assert other != whole
    if kind != "mixture":
        require_once(kind, other)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_with_any_number_of_loader_processes(folder: Path, workers: int) -> None:
    whole = read_epoch(*make_source("tar", folder, workers=0), 1, epoch=0)
    source, plan = make_source("tar", folder, workers)
    try:
        for world_size in (1, 2, 3, 4, 5):
            assert read_epoch(source, plan, world_size, epoch=0) == whole
    finally:
        source.close()
