"""An experiment whose rank 1 is slow, or that runs out of memory as its settings say."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import echelon

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 5.23 GiB is free. Including non-PyTorch memory, this process has 134.56 GiB memory in "
    "use. Of the allocated memory 110.00 GiB is allocated by PyTorch, and 24.00 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@dataclass
class Settings:
    full: str = ""
    """What raises: `cuda`, `host` or `python`."""
    at: int = 9
    """In this forward pass; 0: in the first evaluation."""
    slow: int = -1
    """The rank that takes 100 ms more: longer than a busy machine holds up the others."""
    late: int = -1
    """The rank whose every sample takes 30 ms."""


class Model(nn.Linear):
    cfg: Settings
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            Model.passes += 1
            if int(os.environ["ECHELON_TEST_RANK"]) == self.cfg.slow:
                time.sleep(0.1)
        if self.cfg.full and self.cfg.at == (Model.passes if self.training else 0):
            _fill(self.cfg.full)
        return super().forward(x)


def _fill(how: str) -> None:
    if how == "cuda":
        raise torch.OutOfMemoryError(CUDA)
    if how == "python":
        raise MemoryError
    torch.empty(2**50)


class Late:
    def __init__(self, rank: int) -> None:
        self.pause_s = 0.03 if int(os.environ["ECHELON_TEST_RANK"]) == rank else 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        return torch.ones(4), torch.ones(1)


def experiment(cfg: Settings) -> echelon.Experiment:
    model = Model(4, 1)
    model.cfg = cfg
    data = (torch.ones(64, 4), torch.ones(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    judged = None if cfg.at else data
    given = data if cfg.late < 0 else Late(cfg.late)
    return echelon.Experiment(model, optimizer, nn.functional.mse_loss, given, judged)


def placed(cfg: Settings, devices: tuple[torch.device, ...]) -> echelon.Experiment:
    return experiment(cfg)
