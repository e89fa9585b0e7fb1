"""Batches of a Dataset are copied to a GPU beside the step before, and no memory is used again too
early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from echelon.data.batches import Batch, BlockSlice, DatasetSource
from echelon.data.sample_order import EpochOrder

pytestmark = pytest.mark.gpu

SIZE, BATCH, WIDTH = 512, 16, 1 << 16
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LONG_CYCLES = 2_000_000_000
"""About a second."""
SHORT_CYCLES = 20_000_000


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.full((WIDTH,), index), "number": index, "name": f"n{index}"}


def order(epoch: int = 0) -> EpochOrder:
    return EpochOrder(SIZE, BATCH, 0, 1, 0, epoch)


def occupy_gpu(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@pytest.fixture(params=[0, 2])
def source(request: pytest.FixtureRequest) -> Iterator[DatasetSource]:
    source = DatasetSource(Rows(), request.param, GPU)
    yield source
    source.close()


def sum_rows(batches: Iterator[Batch | BlockSlice], cycles: int) -> list[list[int]]:
    """The sums of all rows of each batch, each behind some other work of the GPU."""
    sums = []
    for batch in batches:
        if cycles:
            occupy_gpu(cycles)
        data: Any = batch.data
        sums.append(torch.stack([data["row"].sum(1), data["number"].to(data["row"].device)]))
        del batch, data  # whose memory may now be used again
    return [each.tolist() for each in sums]


def test_the_same_numbers_as_on_the_cpu(source: DatasetSource) -> None:
    alone = DatasetSource(Rows(), 0)
    for epoch in range(2):
        expected = sum_rows(alone.iter_batches(order(epoch), 0, CPU), 0)
        assert sum_rows(source.iter_batches(order(epoch), 0, GPU), SHORT_CYCLES) == expected


def test_a_batch_is_copied_while_the_gpu_computes(source: DatasetSource) -> None:
    batches = source.iter_batches(order(), 0, GPU)
    next(batches)
    torch.cuda.synchronize()
    occupy_gpu(LONG_CYCLES)
    has_computed = torch.cuda.current_stream().record_event()
    batch: Any = next(batches)
    assert source._copier is not None
    source._copier.stream.synchronize()
    assert not has_computed.query()  # the copy has ended, and the computation has not
    assert batch.data["row"].device == GPU
    rows, numbers = batch.data["row"][:, 0].tolist(), batch.data["number"].tolist()
    assert rows == numbers
    assert has_computed.query()


@dataclass
class Own:
    """Moves itself, and may have tensors that nobody knows of."""

    rows: Tensor

    def to(self, device: torch.device) -> Own:
        return Own(self.rows.to(device, non_blocking=True))


def make_own(samples: list[Any]) -> Own:
    return Own(torch.stack([sample["row"] for sample in samples]))


def test_an_object_that_moves_itself() -> None:
    source = DatasetSource(Rows(), 2, GPU, make_own)
    try:
        for batch in source.iter_batches(order(), 0, GPU):
            occupy_gpu(SHORT_CYCLES // 10)
            data: Any = batch.data
            rows = data.rows
            assert torch.equal(rows[:, 0], rows[:, -1])
    finally:
        source.close()


class OnDevice(Rows):
    """Computes its samples on the GPU, which cannot be pinned."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.full((WIDTH,), index, device=GPU), "number": index}


def test_samples_that_are_on_the_gpu_already() -> None:
    for batch in DatasetSource(OnDevice(), 0, GPU).iter_batches(order(), 0, GPU):
        data: Any = batch.data
        assert data["row"][:, 0].tolist() == data["number"].tolist()
