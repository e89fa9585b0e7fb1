"""Pictures of ten classes: mixup, an average of the weights (EMA), top-1 and top-5 accuracy.

A port of torchvision's references/classification/train.py. The pictures are made here: stripes of
five directions and two widths, under noise. Yours are a Dataset in the place of `draw_stripes`,
such as torchvision.datasets.ImageFolder, with trainer.loader_workers=8.

python image_classification.py
python image_classification.py launch=local launch.procs=2 trainer.epochs=20
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import echelon

# --- model and data

CLASSES = 10
SIDE = 16


@dataclass
class Settings:
    lr: float = 0.02
    width: int = 16
    samples: int = 2048
    mixup: float = 0.2
    """The parameter of the beta distribution by which two pictures are mixed; 0: never."""


def draw_stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures as (count, 3, SIDE, SIDE), and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = (torch.pi / 5 * (labels % 5)).view(-1, 1, 1)
    waves = (2 + 2 * (labels // 5)).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIDE) / SIDE, torch.arange(SIDE) / SIDE, indexing="ij")
    phase = torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(2 * torch.pi * (waves * (x * angle.cos() + y * angle.sin()) + phase))
    color = torch.rand(count, 3, 1, 1, generator=generator)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return color * stripes.unsqueeze(1) + 0.5 * noise, labels


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1),
        ResidualBlock(width),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        ResidualBlock(2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


def mix_pictures(batch: list[Tensor], mixup: float) -> tuple[Tensor, Tensor]:
    """Return every picture mixed with the one before it, and the probabilities of its classes."""
    images, labels = batch
    part = torch.distributions.Beta(mixup, mixup).sample().to(images)
    targets = one_hot(labels, CLASSES).to(images)
    return images.lerp(images.roll(1, 0), part), targets.lerp(targets.roll(1, 0), part)


def make_metrics() -> dict:
    """Imported here, because torchmetrics takes a second, and only an evaluation needs it."""
    from torchmetrics.classification import MulticlassAccuracy

    return {f"top{k}": MulticlassAccuracy(CLASSES, top_k=k, average="micro") for k in (1, 5)}


# --- training

DEFAULTS = [
    "trainer.epochs=10",
    "trainer.batch_size=64",
    "trainer.schedule=cosine",
    "trainer.warmup_steps=30",
    "trainer.ema=0.98",
    "trainer.best=top1",
]


def experiment(cfg: Settings) -> echelon.Experiment:
    model = make_model(cfg.width)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        ),
        loss=partial(cross_entropy, label_smoothing=0.1),
        train_data=draw_stripes(cfg.samples, seed=0),
        eval_data=draw_stripes(512, seed=1),
        metrics=make_metrics,
        batch_transform=partial(mix_pictures, mixup=cfg.mixup) if cfg.mixup else None,
    )


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)
