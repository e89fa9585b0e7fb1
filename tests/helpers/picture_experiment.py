"""Small pictures and a model of convolutions, with both optimizers that are fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import echelon


@dataclass
class Settings:
    samples: int = 18
    optimizer: str = "adam"


def pictures(cfg: Settings) -> echelon.Experiment:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        *(nn.Flatten(), nn.Linear(64, 2)),
    )
    if cfg.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(cfg.samples, 3, 8, 8, generator=generator)
    return echelon.Experiment(
        model, optimizer, nn.functional.cross_entropy, (data, (data.mean((1, 2, 3)) > 0).long())
    )
