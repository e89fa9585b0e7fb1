"""Sequences of different lengths: the loss is a mean over tokens, and not over samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from toy_experiments import Life

import echelon

WORDS, CLASSES, LENGTH, PADDING = 7, 4, 6, 3


@dataclass
class TokenSettings:
    loss: str = "ignore"
    samples: int = 18
    eval_samples: int = 0
    names_count: bool = True
    """Whether the experiment gives `count` for a loss of its own."""


class Tagger(nn.Module):
    """A class for each token. Nothing here depends on how a batch is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.table(tokens)).transpose(1, 2)  # type: ignore[no-any-return]


def tagging(cfg: TokenSettings) -> echelon.Experiment:
    model = Tagger()
    rate = 0.005 if "sum" in cfg.loss else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    Life(optimizer)
    loss, count = make_token_loss(cfg.loss)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=make_tokens(cfg.samples, seed=1),
        eval_data=make_tokens(cfg.eval_samples, seed=2) if cfg.eval_samples else None,
        count=count if cfg.names_count else None,
    )


def make_token_loss(kind: str) -> tuple[Any, Any]:
    """A loss and, where it is not one that is known, its count."""
    weight = torch.tensor([0.2, 1.0, 3.0, 0.5])
    if kind == "ignore":
        return nn.CrossEntropyLoss(ignore_index=PADDING), None
    if kind == "weight":
        return partial(nn.functional.cross_entropy, weight=weight, label_smoothing=0.1), None
    if kind == "sum":
        return nn.CrossEntropyLoss(ignore_index=PADDING, reduction="sum"), None
    if kind == "own sum":
        return own_sum, "sum"
    return own_mean, count_tokens


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    """Not a number where every token is padding."""
    return own_sum(output, target) / (target != PADDING).sum()


def own_sum(output: Tensor, target: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(output, target, reduction="none")
    return (losses * (target != PADDING)).sum()


def count_tokens(output: Tensor, target: Tensor) -> Tensor:
    return (target != PADDING).sum()


def make_tokens(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and their classes. The third sample is padding alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    lengths[2] = 0
    target = (tokens * 2 + 1) % (CLASSES - 1)
    return tokens, target.where(torch.arange(LENGTH) < lengths, PADDING)
