"""Datasets whose samples draw random numbers, as augmentation does."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZE = 17


class RandomSamples(torch.utils.data.Dataset[Any]):
    """A sample is its number and one draw of each generator."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *draw_numbers()], dtype=torch.float64)


class GroupedSamples(RandomSamples):
    """The same, fetched all at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class ProcessNumbers(RandomSamples):
    """A sample is its number and the process that fetched it."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, os.getpid()])


def draw_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def collate_with_draw(samples: list[Tensor]) -> tuple[Tensor, list[float]]:
    return torch.stack(samples), draw_numbers()
