"""What a rank without a sample computes where the other ranks wait for it in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import BatchSource


class FillerBatch:
    """The first sample of the data, which is computed with weight zero.

    One sample, as the others have then: shares of a batch differ by one sample at most.
    """

    def __init__(
        self, source: BatchSource, device: torch.device, transform: BatchTransform | None = None
    ) -> None:
        self._source, self._device, self._transform = source, device, transform
        self._data: Any = None

    def __call__(self) -> Any:
        if self._data is None:
            self._data = self._source.fetch_batch(_FirstSampleOrder(), 0, self._device).data
            if self._transform is not None:
                self._data = self._transform.transform_data(self._data, 1, step=0)
        return self._data


class _FirstSampleOrder:
    """An order with one batch: the first sample."""

    seed, epoch = 0, -1

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        yield torch.arange(1), [1]

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        return self.iter_blocks(first_batch)
