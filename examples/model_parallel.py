"""A model on two devices per process, placed by hand. Without GPUs both are the CPU:

python model_parallel.py replica.devices=2 launch=local launch.procs=2
"""

from dataclasses import dataclass

import torch
from torch import nn

import echelon


class TwoHalves(nn.Module):
    def __init__(self, width: int, devices: tuple[torch.device, ...]) -> None:
        super().__init__()
        self.first, self.last = devices[0], devices[-1]
        self.front = nn.Sequential(nn.Linear(20, width), nn.ReLU()).to(self.first)
        self.back = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.back.to(self.last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(x).to(self.last))  # a batch begins on the first device


@dataclass
class Settings:
    lr: float = 0.05
    width: int = 64
    samples: int = 2048


def data(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(size, 20, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(dim=1, keepdim=True)


def experiment(cfg: Settings, devices: tuple[torch.device, ...]) -> echelon.Experiment:
    """Without `devices`, Echelon would split a Sequential model by itself."""
    model = TwoHalves(cfg.width, devices)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=nn.functional.mse_loss,
        train_data=data(cfg.samples, seed=0),
        eval_data=data(256, seed=1),
    )


if __name__ == "__main__":
    echelon.main(experiment)
