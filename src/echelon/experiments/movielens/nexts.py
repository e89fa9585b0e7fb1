"""Ranking: which movie a user rates next, from the last ones they rated.

A user is what they rated, the newest counting most: a weighted sum of vectors, whose product with
another vector of every movie, and a bias for how popular it is, scores it. Trained as a choice
among all movies, none sampled, on every rating that has one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.data.movielens import Ratings
from echelon.data.movielens.ratings import Array
from echelon.experiments.movielens.histories import Histories
from echelon.experiments.movielens.metrics import ranking_metrics
from echelon.experiments.movielens.opened import (
    SplitSettings,
    fingerprint,
    frozen,
    opened,
    require_positive,
)
from echelon.train.experiment import Experiment, Predict


@dataclass(frozen=True)
class Settings(SplitSettings):
    """Documented with their defaults in conf/experiment/movielens_ranking.yaml."""

    dim: int
    window: int
    lr: float


def experiment(cfg: Settings) -> Experiment:
    require_positive(dim=cfg.dim, window=cfg.window)
    ratings, train, held = opened(cfg)
    histories = Histories(ratings, train)
    model = Next(ratings.num_items, cfg.dim, cfg.window, fingerprint(ratings))
    seen = np.bincount(ratings.items[train], minlength=ratings.num_items)
    with torch.no_grad():
        model.popularity.copy_(torch.from_numpy(np.log(seen + 0.3)))
    return Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,
        train_data=_positions(histories),
        eval_data=_ends(histories, ratings, held) if len(held) else None,
        metrics=lambda: ranking_metrics(ratings.num_items),
        predict=_predict(histories),
    )


class Next(nn.Module):
    def __init__(self, items: int, dim: int, window: int, data: Tensor) -> None:
        super().__init__()
        self.data = frozen(data)
        self.rated = nn.Embedding(items + 1, dim, padding_idx=items)
        """What it says of a user to have rated it; the last row is nothing."""
        self.wanted = nn.Embedding(items, dim)
        self.popularity = nn.Parameter(torch.zeros(items))
        self.recency = nn.Parameter(-0.5 * torch.arange(1.0, window + 1).log())
        """How much the last rating counts, the one before, …; logarithms."""
        for table in (self.rated, self.wanted):
            nn.init.normal_(table.weight, std=0.1)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Next:
        """The model of a snapshot."""
        items, dim = weights["wanted.weight"].shape
        return cls(items, dim, len(weights["recency"]), weights["data"])

    @property
    def nothing(self) -> int:
        return self.wanted.num_embeddings

    def forward(self, windows: Tensor) -> Tensor:
        """[n, window], the newest first → [n, items]."""
        weights = self.recency.exp() * (windows != self.nothing)
        summed = (weights[:, None] @ self.rated(windows))[:, 0]
        user = summed / (weights.sum(1, keepdim=True) + 1).sqrt()
        return torch.addmm(self.popularity, user, self.wanted.weight.T)

    def scores(self, user: int, items: Tensor, ratings: Tensor) -> Tensor:
        """Of all movies, for someone with this history, known in training or not."""
        newest = items.flip(0)[: len(self.recency)]
        room = len(self.recency) - len(newest)
        window: Tensor = self(nn.functional.pad(newest, (0, room), value=self.nothing)[None])[0]
        return window


def _positions(histories: Histories) -> tuple[Tensor, Tensor, Tensor]:
    """Where the user begins, where the rating lies, and what it is of; for all but first ones."""
    counts = histories.begins.diff()
    begins = histories.begins[:-1].repeat_interleave(counts)
    at = torch.arange(len(histories.items))
    later = at > begins
    return begins[later], at[later], histories.items[later].long()


def _ends(histories: Histories, ratings: Ratings, held: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(ratings.users[held]), torch.from_numpy(ratings.items[held]).long()


def _predict(histories: Histories) -> Predict:
    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        assert isinstance(model, Next)
        length, filler = len(model.recency), model.nothing
        if model.training:
            begins, at, target = batch
            return model(histories.windows(begins, at, length, filler)), target
        users, target = batch
        pages = histories.pages(users)
        begins, ends = histories.begins[users], histories.begins[users + 1]
        scores = model(histories.windows(begins, ends, length, filler))
        real = pages.real
        scores[pages.owner[:, None].expand_as(real)[real], pages.items[real]] = -torch.inf
        return scores, target

    return predict
