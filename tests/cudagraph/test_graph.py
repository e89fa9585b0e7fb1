"""The batches of a captured step: packed, and cut out by a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.cudagraph.step_graph import BatchBlocks
from echelon.data.batches import BlockSlice

COLUMNS = {
    "one": (torch.float32, ()),
    "row": (torch.float32, (3,)),
    "numbers": (torch.int64, ()),
    "bytes": (torch.uint8, (5,)),
    "flags": (torch.bool, ()),
    "halves": (torch.bfloat16, (7, 3)),
    "complex": (torch.complex64, (2,)),
    "empty": (torch.float32, (0,)),
}


def column(kind: torch.dtype, shape: tuple[int, ...], rows: int) -> Tensor:
    return torch.randint(0, 2, (rows, *shape)).to(kind) * 7 + torch.arange(rows).view(
        rows, *[1] * len(shape)
    ).to(kind)


@pytest.mark.parametrize("mine", [1, 4, 33])
@pytest.mark.parametrize("names", [["one"], ["empty", "row"], ["row", "numbers"], list(COLUMNS)])
def test_a_batch_is_cut_as_it_lies_in_its_block(names: list[str], mine: int) -> None:
    """A block may be smaller than the largest, and end with a batch that is not whole."""
    torch.manual_seed(0)
    block = tuple(column(*COLUMNS[name], rows=3 * mine + mine // 2) for name in names)
    blocks = BatchBlocks(BlockSlice(block, 0, mine), capacity=5 * mine)
    blocks.load(block)
    for number in (2, 0, 1):
        data = blocks.select_batch(torch.tensor([number]))
        wanted = BlockSlice(block, number * mine, mine).data
        assert wanted is not None
        for got, want in zip(data, wanted, strict=True):
            assert got.dtype == want.dtype
            assert got.is_contiguous()
            assert got.data_ptr() % 64 == 0
            assert torch.equal(got, want)


def test_columns_that_are_not_contiguous() -> None:
    whole = torch.arange(48.0).view(12, 4)
    block = (whole[:, ::2], whole.t().contiguous().t())
    blocks = BatchBlocks(BlockSlice(block, 0, 4), capacity=12)
    blocks.load(block)
    first, second = blocks.select_batch(torch.tensor([1]))
    assert torch.equal(first, block[0][4:8])
    assert torch.equal(second, block[1][4:8])
