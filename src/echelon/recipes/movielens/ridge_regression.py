"""Ratings by a ridge regression per user, over movie features that are learned.

Users have no parameters. The taste of a user is the solution of a ridge regression of their ratings
on what is known of the movies: a learned vector, genres, year, popularity. So a user with ten
ratings is fitted as well as the data allows, and a new user needs no training.

Training predicts every rating from the *other* ratings of its user. Leaving one row out of a ridge
regression has a closed form, error / (1 - leverage). So all leave-one-out errors of a user take one
solve of a small matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from echelon.experiment.definition import Experiment, Predict
from echelon.recipes.movielens.data import Ratings
from echelon.recipes.movielens.data.ratings import Array
from echelon.recipes.movielens.experiment_data import (
    SplitSettings,
    convert_rows_to_tensor,
    encode_fingerprint,
    load_split,
    make_frozen_parameter,
    require_positive,
)
from echelon.recipes.movielens.metrics import make_rating_metrics
from echelon.recipes.movielens.rating_histories import (
    RatingHistories,
    RatingPages,
    make_single_page,
)


@dataclass(frozen=True)
class RidgeRegressionSettings(SplitSettings):
    """Documented with their defaults in conf/experiment/movielens.yaml."""

    dim: int
    metadata: bool
    lr: float
    shrink_vectors: float
    shrink_biases: float


def experiment(cfg: RidgeRegressionSettings) -> Experiment:
    """Return the experiment. A sample is a user in training, and a rating in evaluation."""
    require_positive(dim=cfg.dim)
    ratings, train, held_out = load_split(cfg)
    features = _make_features(ratings, train, cfg.metadata)
    scale = ratings.ratings[train]
    model = UserRidgeModel(features, float(scale.mean()), cfg.dim, encode_fingerprint(ratings))
    return Experiment(
        model=model,
        optimizer=_make_optimizer(model, cfg, len(train)),
        loss=_compute_loss,
        train_data=(torch.from_numpy(np.unique(ratings.users[train])),),
        eval_data=tuple(
            convert_rows_to_tensor(c, held_out)
            for c in (ratings.users, ratings.items, ratings.ratings)
        )
        if len(held_out)
        else None,
        metrics=make_rating_metrics,
        predict=_make_predict(
            RatingHistories(ratings, train), float(scale.min()), float(scale.max())
        ),
    )


class UserRidgeModel(nn.Module):
    """The model. Names of its parameters are keys of snapshots."""

    def __init__(self, features: Tensor, mean: float, dim: int, data: Tensor) -> None:
        super().__init__()
        items, known = features.shape
        self.data = make_frozen_parameter(data)
        self.features = make_frozen_parameter(features)
        self.mean = make_frozen_parameter(torch.tensor(mean))
        self.vectors = nn.Embedding(items, dim)
        self.biases = nn.Embedding(items, 1)
        self.common = nn.Parameter(torch.zeros(known))
        """The effect of each feature on the rating of an average user."""
        self.mixing = nn.Parameter(torch.zeros(known, dim))
        """Maps features to the vector of a movie that has no ratings yet."""
        self.spread = nn.Parameter(torch.tensor([-1.5] * known + [-0.7]))
        """Logarithm of how much users differ in the effect of each feature, and in their mean.

        At 0 they differ as much as their ratings scatter.
        """
        nn.init.normal_(self.vectors.weight, std=0.03)
        nn.init.zeros_(self.biases.weight)

    @classmethod
    def from_weight_shapes(cls, weights: Mapping[str, Tensor]) -> UserRidgeModel:
        """Return an untrained model with the sizes of a snapshot."""
        dim = weights["vectors.weight"].shape[1]
        return cls(weights["features"], float(weights["mean"]), dim, weights["data"])

    def describe_movies(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return the regressors of each movie, and the rating that an average user would give."""
        known = nn.functional.embedding(items, self.features)
        vectors = self.vectors(items) + known @ self.mixing
        slopes = torch.cat([known, torch.ones_like(known[..., :1])], -1) * self.spread.exp()
        offset = self.mean + self.biases(items)[..., 0] + known @ self.common
        return torch.cat([vectors, slopes], -1), offset

    def solve_tastes(self, pages: RatingPages) -> Tensor:
        """Return the coefficients of each user, [users, d]."""
        return self._solve(pages).tastes

    def compute_leave_one_out_errors(self, pages: RatingPages) -> Tensor:
        """Return the error of each rating as predicted from the user's other ratings; 0 where a
        page has no rating."""
        design, residual, inverse, tastes = self._solve(pages)
        error = residual - (design @ tastes[pages.owner, :, None])[..., 0]
        leverage = (design @ inverse[pages.owner] * design).sum(-1)
        return error / (1 - leverage)

    def predict_ratings(self, tastes: Tensor, items: Tensor) -> Tensor:
        """Return the predicted rating of each movie by the taste beside it."""
        design, offset = self.describe_movies(items)
        return offset + (design * tastes).sum(-1)

    def score_movies(self, user: int, items: Tensor, ratings: Tensor) -> Tensor:
        """Return the predicted rating of every movie for a user with this history, whether known in
        training or not."""
        tastes = self.solve_tastes(make_single_page(items, ratings))
        return self.predict_ratings(tastes, torch.arange(len(self.features)))

    def _solve(self, pages: RatingPages) -> _RidgeSolution:
        """Solve the ridge regression of each user by its normal equations, summed over pages."""
        design, offset = self.describe_movies(pages.items)
        design = design * pages.is_rating[..., None]
        residual = (pages.ratings - offset) * pages.is_rating
        ridge = torch.eye(design.shape[-1], device=design.device, dtype=design.dtype)
        gram = ridge.repeat(pages.num_users, 1, 1).index_add(0, pages.owner, design.mT @ design)
        moment = torch.zeros_like(gram[..., 0]).index_add(
            0, pages.owner, (residual[:, None] @ design)[:, 0]
        )
        # If parameters diverge, this gives a loss that is not finite instead of a LAPACK error.
        factor, failed = torch.linalg.cholesky_ex(gram)
        factor = factor.masked_fill((failed != 0)[:, None, None], torch.nan)
        inverse = torch.cholesky_inverse(factor)
        return _RidgeSolution(design, residual, inverse, (inverse @ moment[..., None])[..., 0])


class _RidgeSolution(NamedTuple):
    """The solved regression of every user in a batch."""

    design: Tensor
    """[pages, PAGE_LENGTH, d]: the regressors of each rating."""
    residual: Tensor
    """[pages, PAGE_LENGTH]: the ratings minus what an average user would give."""
    inverse: Tensor
    """[users, d, d]: the inverse of the Gram matrix plus the ridge."""
    tastes: Tensor
    """[users, d]: the coefficients."""


class LeaveOneOutErrors(NamedTuple):
    """What the loss needs in training."""

    errors: Tensor
    expected_ratings: float
    """The average number of ratings of so many users.

    A sample is a user, and a mean over samples keeps its meaning when ranks share a batch; a mean
    over ratings would not.
    """


def _make_predict(histories: RatingHistories, lowest: float, highest: float) -> Predict:
    """Return the function that gathers a batch's histories and calls the model."""
    ratings_per_user = len(histories.items) / max(1, int(histories.begins.diff().count_nonzero()))

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        assert isinstance(model, UserRidgeModel)
        if model.training:
            (users,) = batch
            pages = histories.gather_pages(users)
            return LeaveOneOutErrors(
                model.compute_leave_one_out_errors(pages), ratings_per_user * len(users)
            ), pages.ratings
        users, items, ratings = batch
        distinct, which = torch.unique(users, return_inverse=True)
        tastes = model.solve_tastes(histories.gather_pages(distinct))[which]
        return model.predict_ratings(tastes, items).clamp(lowest, highest), ratings

    return predict


def _compute_loss(output: Any, target: Tensor) -> Tensor:
    """Return the mean squared error, in training of the leave-one-out predictions."""
    if isinstance(output, LeaveOneOutErrors):
        return output.errors.square().sum() / output.expected_ratings
    return nn.functional.mse_loss(output, target)


def _make_optimizer(
    model: UserRidgeModel, cfg: RidgeRegressionSettings, ratings: int
) -> torch.optim.Optimizer:
    """Return Adam with weight decay on vectors and biases.

    The penalties refer to the sum over all ratings, so that they mean the same for data of any
    size.
    """
    decayed = {model.vectors.weight: cfg.shrink_vectors, model.biases.weight: cfg.shrink_biases}
    groups: list[dict[str, Any]] = [
        {"params": [table], "weight_decay": 2 * shrink / ratings}
        for table, shrink in decayed.items()
    ]
    rest = [p for p in model.parameters() if p.requires_grad and p not in decayed]
    return torch.optim.Adam([*groups, {"params": rest}], lr=cfg.lr, betas=(0.9, 0.99))


# --- features of movies ---


def _make_features(ratings: Ratings, train: Array, metadata: bool) -> Tensor:
    """Return [items, features], each with mean zero over the training ratings."""
    items = ratings.items[train]
    popularity = np.log1p(np.bincount(items, minlength=ratings.num_items))
    columns = [popularity[:, None] / max(1e-6, float(popularity[items].std()))]
    if metadata:
        columns += [_make_genre_features(ratings), _make_year_features(ratings)]
    table = np.concatenate(columns, 1)
    return torch.from_numpy((table - table[items].mean(0)).astype(np.float32))


def _make_genre_features(ratings: Ratings) -> Array:
    """Return one column of 0 and 1 for each genre."""
    of_items = ratings.get_genres()
    names = sorted({name for genres in of_items for name in genres})
    return np.array([[name in genres for name in names] for genres in of_items], np.float64)


def _make_year_features(ratings: Ratings) -> Array:
    """Return the year in units of twenty years, so that it has about the range of a genre; 0 if
    unknown."""
    matches = [re.search(r"\((\d{4})\)\s*$", title) for title in ratings.get_titles()]
    years = np.array([float(match[1]) if match else np.nan for match in matches])
    middle = np.nanmean(years) if np.isfinite(years).any() else 0.0
    return np.nan_to_num((years - middle) / 20)[:, None]
