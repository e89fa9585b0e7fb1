"""The order of samples, drawn on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

from echelon.data.order import permute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1000, 2**20 + 1, 2**31, 10**12])
def test_it_is_the_order_of_the_cpu(size: int) -> None:
    positions = torch.arange(min(size, 5000))
    drawn = permute(positions.cuda(), size, 1, 2)
    assert drawn.is_cuda
    assert torch.equal(drawn.cpu(), permute(positions, size, 1, 2))
