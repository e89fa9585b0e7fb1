"""Ratings by matrix factorization: a bias and a vector for each user and each movie.

`tower` adds an MLP over both vectors. Users are rows of a table here, so only users seen in
training can be scored; ridge_regression.py has no such table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from echelon.experiment.definition import Experiment
from echelon.optim import RowAdam
from echelon.recipes.movielens.experiment_data import (
    SplitSettings,
    convert_rows_to_tensor,
    encode_fingerprint,
    load_split,
    make_frozen_parameter,
    require_positive,
)
from echelon.recipes.movielens.metrics import make_rating_metrics


@dataclass(frozen=True)
class MatrixFactorizationSettings(SplitSettings):
    """Documented with their defaults in conf/experiment/movielens_dot.yaml."""

    dim: int
    tower: list[int]
    sparse: bool
    lr: float
    weight_decay: float


def experiment(cfg: MatrixFactorizationSettings) -> Experiment:
    """Return the experiment. A sample is one rating."""
    require_positive(dim=cfg.dim, **{f"tower[{n}]": width for n, width in enumerate(cfg.tower)})
    ratings, train, held_out = load_split(cfg)
    columns = ratings.users, ratings.items, ratings.ratings
    scale = ratings.ratings[train]
    sizes = ratings.num_users, ratings.num_items
    model = MatrixFactorization(sizes, cfg.dim, cfg.tower, encode_fingerprint(ratings), cfg.sparse)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        model.scale.copy_(torch.tensor([scale.mean(), scale.min(), scale.max()]))
    return Experiment(
        model=model,
        optimizer=RowAdam(trained, lr=cfg.lr, weight_decay=cfg.weight_decay),
        loss=nn.functional.mse_loss,
        train_data=tuple(convert_rows_to_tensor(c, train) for c in columns),
        eval_data=tuple(convert_rows_to_tensor(c, held_out) for c in columns)
        if len(held_out)
        else None,
        metrics=make_rating_metrics,
    )


class MatrixFactorization(nn.Module):
    """The model. Names of its parameters are keys of snapshots. In evaluation mode predictions are
    clipped to the scale of the ratings."""

    def __init__(
        self,
        sizes: tuple[int, int],
        dim: int,
        widths: Sequence[int],
        data: Tensor,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        users, items = sizes
        self.data = make_frozen_parameter(data)
        self.scale = make_frozen_parameter(torch.tensor([0.0, -torch.inf, torch.inf]))
        """Mean, lowest and highest of the ratings trained on."""
        self.users = nn.Embedding(users, dim, sparse=sparse)
        self.items = nn.Embedding(items, dim, sparse=sparse)
        self.user_biases = nn.Embedding(users, 1, sparse=sparse)
        self.item_biases = nn.Embedding(items, 1, sparse=sparse)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([2 * dim, *widths]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.tower = nn.Sequential(*layers, nn.Linear(widths[-1], 1)) if widths else None
        for vectors in (self.users, self.items):
            nn.init.normal_(vectors.weight, std=0.1 / dim**0.5)
        for biases in (self.user_biases, self.item_biases):
            nn.init.zeros_(biases.weight)

    @classmethod
    def from_weight_shapes(cls, weights: Mapping[str, Tensor]) -> MatrixFactorization:
        """Return an untrained model with the sizes of a snapshot."""
        layers = [w for key, w in weights.items() if key.startswith("tower.") and w.ndim == 2]
        users, dim = weights["users.weight"].shape
        sizes = users, len(weights["items.weight"])
        return cls(sizes, dim, [len(w) for w in layers[:-1]], weights["data"])

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        mean, lowest, highest = self.scale
        a, b = self.users(users), self.items(items)
        biases = self.user_biases(users) + self.item_biases(items)
        rating = mean + biases[..., 0] + (a * b).sum(-1)
        if self.tower is not None:
            rating = rating + self.tower(torch.cat([a, b], -1))[..., 0]
        clipped: Tensor = rating if self.training else rating.clamp(lowest, highest)
        return clipped

    def score_movies(self, user: int, items: Tensor, ratings: Tensor) -> Tensor:
        """Return the score of every movie for a user who was in the training data."""
        everything = torch.arange(self.items.num_embeddings)
        self.train()  # without clipping, which would make all movies at the top of the scale tie
        scores: Tensor = self(torch.full_like(everything, user), everything)
        return scores
