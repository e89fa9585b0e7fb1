"""A model whose layers keep averages of the batches they saw in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import echelon

FEATURES = 4


@dataclass
class Settings:
    eval_samples: int = 7
    lr: float = 0.05
    frozen: bool = False
    """Its first layer."""


def layer(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh())


def normed(cfg: Settings) -> echelon.Experiment:
    model = nn.Sequential(layer(FEATURES), layer(8), nn.Linear(8, 1))
    if cfg.frozen:
        model[0].requires_grad_(False).eval()
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=nn.functional.mse_loss,
        train_data=_data(32, 1),
        eval_data=_data(cfg.eval_samples, 2),
    )


def _data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples that are wider the later they come, so that ranks see different averages."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator) * torch.linspace(0.2, 5, size)[:, None]
    return x, x.sum(1, keepdim=True)
