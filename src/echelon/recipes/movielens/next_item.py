"""Ranking: which movie a user rates next, given the movies they rated last.

A user is represented by a weighted sum of the vectors of the rated movies, the newest weighing
most. Its product with another vector of every movie, plus a bias for popularity, is the score. The
model is trained with cross entropy over all movies, without negative sampling, on every rating that
has one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.experiment.definition import Experiment, Predict
from echelon.recipes.movielens.data import Ratings
from echelon.recipes.movielens.data.ratings import Array
from echelon.recipes.movielens.experiment_data import (
    SplitSettings,
    encode_fingerprint,
    load_split,
    make_frozen_parameter,
    require_positive,
)
from echelon.recipes.movielens.metrics import make_ranking_metrics
from echelon.recipes.movielens.rating_histories import RatingHistories


@dataclass(frozen=True)
class NextItemSettings(SplitSettings):
    """Documented with their defaults in conf/experiment/movielens_ranking.yaml."""

    dim: int
    window: int
    lr: float


def experiment(cfg: NextItemSettings) -> Experiment:
    """Return the experiment. A sample is a rating and those before it."""
    require_positive(dim=cfg.dim, window=cfg.window)
    ratings, train, held_out = load_split(cfg)
    histories = RatingHistories(ratings, train)
    model = NextItemModel(ratings.num_items, cfg.dim, cfg.window, encode_fingerprint(ratings))
    counts = np.bincount(ratings.items[train], minlength=ratings.num_items)
    with torch.no_grad():
        model.popularity.copy_(torch.from_numpy(np.log(counts + 0.3)))
    return Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,
        train_data=_make_train_positions(histories),
        eval_data=_make_eval_targets(histories, ratings, held_out) if len(held_out) else None,
        metrics=lambda: make_ranking_metrics(ratings.num_items),
        predict=_make_predict(histories),
    )


class NextItemModel(nn.Module):
    """The model. Names of its parameters are keys of snapshots."""

    def __init__(self, items: int, dim: int, window: int, data: Tensor) -> None:
        super().__init__()
        self.data = make_frozen_parameter(data)
        self.rated = nn.Embedding(items + 1, dim, padding_idx=items)
        """What a rated movie says about its user; the last row is the padding."""
        self.wanted = nn.Embedding(items, dim)
        self.popularity = nn.Parameter(torch.zeros(items))
        self.recency = nn.Parameter(-0.5 * torch.arange(1.0, window + 1).log())
        """Logarithm of the weight of the newest rating, the one before, and so on."""
        for table in (self.rated, self.wanted):
            nn.init.normal_(table.weight, std=0.1)

    @classmethod
    def from_weight_shapes(cls, weights: Mapping[str, Tensor]) -> NextItemModel:
        """Return an untrained model with the sizes of a snapshot."""
        items, dim = weights["wanted.weight"].shape
        return cls(items, dim, len(weights["recency"]), weights["data"])

    @property
    def padding_index(self) -> int:
        """The index of the empty row, which fills windows of short histories."""
        return self.wanted.num_embeddings

    def forward(self, windows: Tensor) -> Tensor:
        """Return scores [n, items] for windows [n, window] of items, the newest first."""
        weights = self.recency.exp() * (windows != self.padding_index)
        summed = (weights[:, None] @ self.rated(windows))[:, 0]
        user = summed / (weights.sum(1, keepdim=True) + 1).sqrt()
        return torch.addmm(self.popularity, user, self.wanted.weight.T)

    def score_movies(self, user: int, items: Tensor, ratings: Tensor) -> Tensor:
        """Return the score of every movie for a user with this history, whether known in training
        or not."""
        newest = items.flip(0)[: len(self.recency)]
        padding = len(self.recency) - len(newest)
        window: Tensor = self(
            nn.functional.pad(newest, (0, padding), value=self.padding_index)[None]
        )[0]
        return window


def _make_train_positions(histories: RatingHistories) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each rating but a user's first: where the user's history starts, the rating's
    position, and its movie."""
    counts = histories.begins.diff()
    begins = histories.begins[:-1].repeat_interleave(counts)
    at = torch.arange(len(histories.items))
    later = at > begins
    return begins[later], at[later], histories.items[later].long()


def _make_eval_targets(
    histories: RatingHistories, ratings: Ratings, held_out: Array
) -> tuple[Tensor, Tensor]:
    """Return the user and the held-out movie of each evaluation sample."""
    return torch.from_numpy(ratings.users[held_out]), torch.from_numpy(
        ratings.items[held_out]
    ).long()


def _make_predict(histories: RatingHistories) -> Predict:
    """Return the function that gathers a batch's histories and calls the model. In evaluation,
    movies that the user has rated cannot be predicted."""

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        assert isinstance(model, NextItemModel)
        length, filler = len(model.recency), model.padding_index
        if model.training:
            begins, at, target = batch
            return model(histories.gather_windows(begins, at, length, filler)), target
        users, target = batch
        pages = histories.gather_pages(users)
        begins, ends = histories.begins[users], histories.begins[users + 1]
        scores = model(histories.gather_windows(begins, ends, length, filler))
        real = pages.is_rating
        scores[pages.owner[:, None].expand_as(real)[real], pages.items[real]] = -torch.inf
        return scores, target

    return predict
