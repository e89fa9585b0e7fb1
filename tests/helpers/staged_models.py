"""Models that are cut into stages, placed by hand, or cannot be cut."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from toy_experiments import FEATURES, Settings, regression

import echelon


def _trains(cfg: Settings, model: nn.Module) -> echelon.Experiment:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    if cfg.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    return replace(regression(cfg), model=model, optimizer=optimizer)


def deep(cfg: Settings) -> echelon.Experiment:
    width, layers = (
        cfg.hidden,
        [nn.Linear(FEATURES, cfg.hidden), nn.Tanh(), nn.Dropout(cfg.dropout)],
    )
    for _ in range(2):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(cfg.dropout)]
    return _trains(cfg, nn.Sequential(*layers, nn.Linear(width, 1)))


class Halves(nn.Module):
    def __init__(self, cfg: Settings, devices: tuple[torch.device, ...]) -> None:
        super().__init__()
        self.last = devices[-1]
        self.front = nn.Linear(FEATURES, cfg.hidden).to(devices[0])
        self.back = nn.Linear(cfg.hidden, 1).to(self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.front(x).tanh().to(self.last))  # type: ignore[no-any-return]


def by_hand(cfg: Settings, devices: tuple[torch.device, ...]) -> echelon.Experiment:
    return _trains(cfg, Halves(cfg, devices))


class Free(nn.Module):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(FEATURES, cfg.hidden), nn.Linear(cfg.hidden, 1)


def free(cfg: Settings) -> echelon.Experiment:
    return _trains(cfg, Free(cfg))
