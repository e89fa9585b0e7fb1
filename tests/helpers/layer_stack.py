"""A small stack of layers of one class, as large models are built, to be sharded and recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import toy_experiments
from torch import Tensor, nn

import echelon

WORDS, LENGTH, WIDTH = 11, 6, 12
FAR = 5000.0


@dataclass
class Settings:
    samples: int = 17
    eval_samples: int = 0
    layers: int = 3
    optimizer: str = "adam"
    lr: float = 0.01
    scale: float = 0.0
    sparse: bool = False
    number: bool = False
    """A parameter without a shape."""
    imaginary: bool = False
    norm: bool = False
    """A layer with buffers that every training step changes."""
    noise: float = 0.0
    outside: bool = False
    """A weight is used outside the model's own pass."""


class Block(nn.Module):
    def __init__(self, noise: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.after = nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))
        self.drop = nn.Dropout(noise)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before(x).transpose(1, 2)).transpose(1, 2)
        found: Tensor = x + self.drop(self.wide(self.after(x)))
        return found


class Stack(nn.Module):
    """Tied weights, a buffer, and parameters in no block."""

    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=cfg.sparse)
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None].repeat(1, WIDTH))
        self.layers = nn.ModuleList([Block(cfg.noise) for _ in range(cfg.layers)])
        self.norm = nn.BatchNorm1d(LENGTH) if cfg.norm else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        one = torch.tensor(1.0) if cfg.number else torch.ones(1)
        self.scale = nn.Parameter(one.to(torch.complex64) if cfg.imaginary else one)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        found: Tensor = self.head(x) * self.scale
        return found


def stack(cfg: Settings) -> echelon.Experiment:
    model = Stack(cfg)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups: Any = [{"params": decayed, "lr": cfg.lr / 2}, {"params": plain}]
    optimizers: dict[str, Any] = {
        "adam": lambda: torch.optim.Adam(groups, lr=cfg.lr),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=cfg.lr),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=cfg.lr),
        "momentum": lambda: torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9),
    }
    optimizer = optimizers[cfg.optimizer]()
    toy_experiments.Life(optimizer)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target),
        train_data=_data(cfg.samples, 1),
        eval_data=_data(cfg.eval_samples, 2) if cfg.eval_samples else None,
        scaler=torch.amp.GradScaler("cpu", cfg.scale, growth_interval=4) if cfg.scale else None,
        predict=_outside if cfg.outside else _predict,
    )


def _predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    words, following = batch
    return model(words), following.flatten()


def _outside(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    output, target = _predict(model, batch)
    return output * model.layers[0].mix.bias.mean(), target  # type: ignore[index, union-attr]


def _data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    return words, (words * 3 + 1) % WORDS


class Centred(nn.Sequential):
    """Takes numbers far from zero as they are, and their mean off them: in half precision nothing
    of them would be left."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x - FAR)  # type: ignore[no-untyped-call]
        return found


def centred(cfg: Settings) -> echelon.Experiment:
    model = Centred(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, 1))
    x = torch.randn(cfg.samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=nn.functional.mse_loss,
        train_data=(x + FAR, x.sum(1, keepdim=True)),
    )
