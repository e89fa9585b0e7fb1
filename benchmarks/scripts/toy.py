"""The same model and data for all: 20 → 1, 2048 samples, a global batch of 32 on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SAMPLES, FEATURES, BATCH = 2048, 20, 32


def data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator)


class Ready:
    """Batches for Lightning, to which a list would mean several loaders."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)
