"""The ratings of a run, split as its settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.data.movielens import Ratings, last_out_split, load, random_split
from echelon.data.movielens.ratings import Array
from echelon.errors import EchelonError, Fault, nearest

SPLITS = ("random", "time")


@dataclass(frozen=True)
class SplitSettings:
    """What every experiment on MovieLens is told; documented in conf/experiment/movielens.yaml."""

    data: str
    split: str
    held_out: float
    split_seed: int


class Opened(NamedTuple):
    all: Ratings
    train: Array
    """Row numbers."""
    held: Array


def opened(cfg: SplitSettings) -> Opened:
    ratings = load(cfg.data)
    if cfg.split not in SPLITS:
        raise EchelonError(
            Fault(f"split={cfg.split}: there is no such split", nearest(cfg.split, SPLITS))
        )
    by_time = cfg.split == "time" and cfg.held_out > 0
    rows = (
        last_out_split(ratings, cfg.split_seed)
        if by_time
        else random_split(len(ratings.users), cfg.held_out, cfg.split_seed)
    )
    return Opened(ratings, *rows)


def column(values: Array, rows: Array) -> Tensor:
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


def frozen(values: Tensor) -> nn.Parameter:
    """Saved with the model and never trained. DDP sends buffers with every step; not these."""
    return nn.Parameter(values, requires_grad=False)


def fingerprint(ratings: Ratings) -> nn.Parameter:
    """Dense ids mean nothing beside other data: a snapshot says which it was trained on."""
    return frozen(torch.tensor(list(ratings.fingerprint.encode()), dtype=torch.uint8))


def fingerprint_of(weights: Any) -> str:
    return bytes(weights["data"].tolist()).decode()
