"""Batches of loader processes in blocks of shared memory: the same as without, and never
overwritten while somebody has them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from echelon.data import batch_blocks
from echelon.data.batch_blocks import BatchBlockWriter, PackedBatch
from echelon.data.batches import DatasetSource
from echelon.data.sample_order import EpochOrder

CPU = torch.device("cpu")
SIZE = 60
BATCH = 3


class Numbered(Dataset[Any]):
    """A sample is its number in several types; its size changes with the batch."""

    kept: Tensor | None = None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {
            "row": torch.full((7,), index, dtype=torch.bfloat16),
            "array": np.full((2, 3), index),
            "number": index,
            "name": f"n{index}",
            "none": torch.empty(0),
        }


def order(epoch: int = 0) -> EpochOrder:
    return EpochOrder(SIZE, BATCH, 0, 1, 0, epoch)


def read(data: Any, workers: int, collate_fn: Any = None, epoch: int = 0) -> Iterator[Any]:
    source = DatasetSource(data, workers, collate_fn=collate_fn)
    try:
        for batch in source.iter_batches(order(epoch), 0, CPU):
            yield batch.data
    finally:
        source.close()


def describe(batch: Any) -> Any:
    """All there is to see of a batch."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.shape, batch.stride(), batch.requires_grad, batch.tolist()
    if isinstance(batch, np.ndarray):
        return batch.dtype, batch.strides, batch.tolist()
    if isinstance(batch, dict):
        return {name: describe(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch), [describe(value) for value in batch]
    return batch


def make_odd_batch(samples: list[Any]) -> Any:
    """What default_collate does not make: strides, gaps, aliases, arrays, gradients, nothing."""
    numbers = torch.tensor([sample["number"] for sample in samples], dtype=torch.float32)
    pictures = torch.stack([numbers[0].expand(3, 4, 4) for _ in samples])
    return (
        pictures.to(memory_format=torch.channels_last),
        numbers.expand(1000, len(samples)),
        torch.outer(numbers, numbers)[:, :-1],
        torch.arange(1000)[:: len(samples) * 100],
        numbers.clone().requires_grad_(),
        numbers > 3,
        np.asfortranarray(np.outer(numbers, numbers)),
        torch.zeros(2, 0, 3),
        torch.complex(numbers, numbers).conj(),
        [sample["name"] for sample in samples],
        torch.nn.Parameter(numbers[:1].clone(), requires_grad=False),
    )


@pytest.mark.parametrize("collate_fn", [None, make_odd_batch])
def test_batches_are_the_same_as_without_processes(collate_fn: Any) -> None:
    alone = [describe(batch) for batch in read(Numbered(), 0, collate_fn)]
    crossed = [describe(batch) for batch in read(Numbered(), 2, collate_fn)]
    for number, (one, other) in enumerate(zip(crossed, alone, strict=True)):
        assert one == other, number


def count_in_blocks(batches: list[Any]) -> int:
    """How many of the rows lie in a block."""
    spans = [(block.ctypes.data, block.nbytes) for block in batch_blocks._received.values()]
    rows = [batch["row"].data_ptr() for batch in batches]
    return sum(any(start <= row < start + size for start, size in spans) for row in rows)


@pytest.mark.slow
def test_a_batch_that_is_kept_is_not_overwritten() -> None:
    """Nor one whose tensors are all gone but a view of one; and blocks are used again."""
    # Those of a neighbour, whose processes have not been closed.
    others, others_in_use = set(batch_blocks._received), set(batch_blocks._in_use)
    source = DatasetSource(Numbered(), 1, options={"prefetch_factor": 2})
    batches = [batch.data for batch in source.iter_batches(order(), 0, CPU)]
    assert count_in_blocks(batches) == len(batches)
    expected = [describe(batch) for batch in read(Numbered(), 0)]
    blocks = len(batch_blocks._received)
    views = [batch["row"][1:, 2] for batch in batches]
    wanted = [batch["row"][1:, 2].tolist() for batch in batches]
    assert [describe(batch) for batch in batches] == expected
    del batches
    for epoch in range(1, 4):
        for batch in source.iter_batches(order(epoch), 0, CPU):
            assert batch.data["number"].tolist() == batch.data["row"][:, 0].tolist()
    assert [view.tolist() for view in views] == wanted
    assert len(batch_blocks._received) <= blocks + 4
    del views, batch
    gc.collect()
    assert set(batch_blocks._in_use) <= others_in_use
    for _ in source.iter_batches(order(5), 0, CPU):
        pass
    assert len(batch_blocks._received) <= blocks + 4
    source.close()
    assert set(batch_blocks._received) <= others


class Growing(Numbered):
    """Batches become larger and smaller again."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 + index % 50 * 100,), index)


def pad(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_batches_of_changing_sizes() -> None:
    expected = [describe(batch) for batch in read(Growing(), 0, pad)]
    assert [describe(batch) for batch in read(Growing(), 1, pad)] == expected


class Keeping(Numbered):
    """Keeps in its process what default_collate made for the sample before."""

    number = -1.0

    def __getitem__(self, index: int) -> Any:
        before = -1.0 if self.kept is None else float(self.kept[0, 0])
        known = self.number
        self.kept = default_collate([torch.full((50,), float(index))] * 2)
        self.number = float(index)
        return torch.tensor([index, before, known])


def test_what_the_users_code_keeps_in_a_loader_process_stays() -> None:
    for batch in read(Keeping(), 1):
        assert batch[:, 1].tolist() == batch[:, 2].tolist()


@pytest.mark.slow
def test_a_forked_process_does_not_free_the_blocks_of_its_parent() -> None:
    others = set(batch_blocks._received)
    source = DatasetSource(Numbered(), 1)
    batches = source.iter_batches(order(), 0, CPU)
    held = [next(batches).data]
    received = batch_blocks._received.items()
    [array] = [a for key, a in received if a[0] and key not in others][:1]
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        held.clear()
        gc.collect()
        os.write(writing, bytes([array[0]]))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reading, 1) == b"\x01"
    os.close(reading)
    os.close(writing)
    del batches
    source.close()


def test_without_a_free_block_a_batch_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_blocks, "_MAX_BLOCKS", 1)
    packer = BatchBlockWriter()
    sent = []
    for number in range(3):
        packer.begin_batch()
        sent.append(packer.pack_batch(torch.full((9,), number)))
    assert isinstance(sent[0], PackedBatch)
    assert [batch.tolist() for batch in sent[1:]] == [[1] * 9, [2] * 9]
    packer.begin_batch()
    assert packer.pack_batch({"only": "text", "and": 3}) == {"only": "text", "and": 3}
    assert callable(packer.pack_batch([lambda: 3, torch.ones(3)])[0])


def test_blocks_that_are_not_needed_any_more_are_given_back() -> None:
    packer = BatchBlockWriter()
    for number in range(6):  # none is freed
        packer.begin_batch()
        packer.pack_batch(torch.full((9,), number))
    assert len(packer._blocks) == 6
    counts = []
    for _ in range(1000):
        for block in packer._blocks:
            block.array[0] = 0
        packer.begin_batch()
        counts.append(packer.pack_batch(torch.ones(9)).memory.block_count)
    assert counts[0] == 6
    assert counts[-1] == 2
