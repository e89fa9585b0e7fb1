"""The ratings of a run, split into training and held-out rows as its settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.recipes.movielens.data import Ratings, load_ratings, split_newest, split_randomly
from echelon.recipes.movielens.data.ratings import Array

SPLIT_KINDS = ("random", "time")


@dataclass(frozen=True)
class SplitSettings:
    """The settings that every experiment on MovieLens has; documented in
    conf/experiment/movielens.yaml."""

    data: str
    split: str
    held_out: float
    split_seed: int


class SplitRatings(NamedTuple):
    """All ratings, and the row numbers of the two parts."""

    ratings: Ratings
    train: Array
    """Row numbers."""
    held_out: Array


def load_split(cfg: SplitSettings) -> SplitRatings:
    """Load the ratings and split them."""
    ratings = load_ratings(cfg.data)
    if cfg.split not in SPLIT_KINDS:
        raise EchelonError(
            Fault(
                f"split={cfg.split}: there is no such split",
                suggest_nearest(cfg.split, SPLIT_KINDS),
            )
        )
    by_time = cfg.split == "time" and cfg.held_out > 0
    rows = (
        split_newest(ratings, cfg.split_seed)
        if by_time
        else split_randomly(len(ratings.users), cfg.held_out, cfg.split_seed)
    )
    return SplitRatings(ratings, *rows)


def convert_rows_to_tensor(values: Array, rows: Array) -> Tensor:
    """Return some rows of a column as a tensor."""
    return torch.from_numpy(values[rows])


def require_positive(**settings: float) -> None:
    """Raise with a fault for every setting that is not above zero."""
    faults = [
        Fault(f"{key}={value}: it must be larger than zero", f"set {key}=16, for example")
        for key, value in settings.items()
        if not value > 0
    ]
    if faults:
        raise EchelonError(*faults)


# --- what a snapshot stores besides trained parameters ---


def make_frozen_parameter(values: Tensor) -> nn.Parameter:
    """Return a tensor that is saved with the model and never trained.

    It is a parameter, not a buffer, because DDP broadcasts buffers at every step.
    """
    return nn.Parameter(values, requires_grad=False)


def encode_fingerprint(ratings: Ratings) -> nn.Parameter:
    """Return the fingerprint of the data as a tensor, so that a snapshot records what it was
    trained on.

    Dense ids are meaningless with other data.
    """
    return make_frozen_parameter(
        torch.tensor(list(ratings.fingerprint.encode()), dtype=torch.uint8)
    )


def decode_fingerprint(weights: Any) -> str:
    """Return the fingerprint of the data that a snapshot was trained on."""
    return bytes(weights["data"].tolist()).decode()
