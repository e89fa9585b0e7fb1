"""The ratings of a run, split as its settings say."""

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
    """What every experiment on MovieLens is told; documented in conf/experiment/movielens.yaml."""

    data: str
    split: str
    held_out: float
    split_seed: int


class SplitRatings(NamedTuple):
    ratings: Ratings
    train: Array
    """Row numbers."""
    held_out: Array


def load_split(cfg: SplitSettings) -> SplitRatings:
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


def select_rows(values: Array, rows: Array) -> Tensor:
    return torch.from_numpy(values[rows])


def require_positive(**settings: float) -> None:
    faults = [
        Fault(f"{key}={value}: it must be larger than zero", f"set {key}=16, for example")
        for key, value in settings.items()
        if not value > 0
    ]
    if faults:
        raise EchelonError(*faults)


# --- what a snapshot keeps beside what was trained ---


def make_frozen_parameter(values: Tensor) -> nn.Parameter:
    """Saved with the model and never trained. DDP sends buffers with every step; not these."""
    return nn.Parameter(values, requires_grad=False)


def encode_fingerprint(ratings: Ratings) -> nn.Parameter:
    """Dense ids mean nothing beside other data: a snapshot says which it was trained on."""
    return make_frozen_parameter(
        torch.tensor(list(ratings.fingerprint.encode()), dtype=torch.uint8)
    )


def decode_fingerprint(weights: Any) -> str:
    return bytes(weights["data"].tolist()).decode()
