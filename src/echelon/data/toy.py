"""Synthetic data for examples and tests: random inputs, a linear target, noise."""

from __future__ import annotations

import torch
from torch import Tensor


def make_linear_data(samples: int, features: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(features, 1, generator=generator)
    x = torch.randn(samples, features, generator=generator)
    return x, x @ truth + noise * torch.randn(samples, 1, generator=generator)
