"""Random data and a linear model, which the examples train."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

import echelon


class MyTrainDataset(Dataset):
    """Random inputs, and targets that a linear model can learn."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.rand(size, 20, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True) + 0.01 * torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


@dataclass
class Settings:
    lr: float = 0.01
    samples: int = 2048


def experiment(cfg: Settings) -> echelon.Experiment:
    model = torch.nn.Linear(20, 1)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=torch.nn.functional.mse_loss,
        train_data=MyTrainDataset(cfg.samples),
        eval_data=MyTrainDataset(256, seed=1),
    )
