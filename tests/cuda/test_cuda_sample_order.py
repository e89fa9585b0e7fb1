"""The order of samples, drawn on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

from echelon.data.sample_order import map_positions

pytestmark = pytest.mark.gpu


WORDS_END = [end + off for end in (2**31, 2**32) for off in (-1, 0, 1)]
"""Where samples, or the size itself, no longer fit 32 bits with and without a sign."""


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**20 + 1, *WORDS_END, 10**12])
def test_it_is_the_order_of_the_cpu(size: int) -> None:
    few = min(size, 5000)
    positions = torch.cat([torch.arange(few), torch.arange(size - few, size)])
    drawn = map_positions(positions.cuda(), size, 1, 2)
    assert drawn.is_cuda
    assert torch.equal(drawn.cpu(), map_positions(positions, size, 1, 2))


@pytest.mark.parametrize("size", [5, 17, 2**31 - 1, 2**31 + 1])
def test_a_position_outside_the_epoch_does_not_walk_for_ever(size: int) -> None:
    domain = 1 << (size - 1).bit_length()
    outside = torch.arange(size, min(domain, size + 1000))
    for seed in range(20):
        drawn = map_positions(outside.cuda(), size, seed, 0)
        assert torch.equal(drawn.cpu(), map_positions(outside, size, seed, 0))
