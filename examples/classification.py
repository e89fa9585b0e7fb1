"""Points of three classes, told apart by a small network: accuracy and F1 of the best snapshot."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import echelon

CLASSES = ("inner", "middle", "outer")


@dataclass
class Settings:
    lr: float = 0.01
    width: int = 32
    samples: int = 1536


def make_rings(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on three noisy rings, and the ring of each."""
    generator = torch.Generator().manual_seed(seed)
    ring = torch.randint(0, len(CLASSES), (size,), generator=generator)
    angle = 2 * torch.pi * torch.rand(size, generator=generator)
    radius = 1.0 + ring + 0.25 * torch.randn(size, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring


def make_metrics() -> dict:
    """Imported here, because torchmetrics takes a second, and only an evaluation needs it."""
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    classes = len(CLASSES)
    return {
        "accuracy": MulticlassAccuracy(classes, average="micro"),
        "f1": MulticlassF1Score(classes, average=None),  # one number for each class
    }


def experiment(cfg: Settings) -> echelon.Experiment:
    model = nn.Sequential(
        nn.Linear(2, cfg.width),
        nn.ReLU(),
        nn.Linear(cfg.width, cfg.width),
        nn.ReLU(),
        nn.Linear(cfg.width, len(CLASSES)),
    )
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,
        train_data=make_rings(cfg.samples, seed=0),
        eval_data=make_rings(512, seed=1),
        metrics=make_metrics,
    )


if __name__ == "__main__":
    echelon.main(experiment)
