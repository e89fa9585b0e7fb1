"""What each user rated, one user after the other, and cuts of it by index, on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.data.movielens import Ratings
from echelon.data.movielens.ratings import Array

PAGE = 64
"""Users have rated twenty movies or thousands. Pages of equal length waste less than padding to the
longest, and their products are still those of matrices."""


class Pages(NamedTuple):
    """Ratings of some users; a user has as many pages as it takes."""

    items: Tensor
    """[pages, PAGE]; 0 where `real` is false."""
    ratings: Tensor
    real: Tensor
    owner: Tensor
    """[pages]: whose, as a position among the users asked for."""
    users: int


class Histories:
    """Kept outside the model: it is data, and DDP would send a buffer with every step."""

    def __init__(self, ratings: Ratings, rows: Array) -> None:
        """In the order of time."""
        rows = rows[np.argsort(ratings.times[rows], kind="stable")]
        rows = rows[np.argsort(ratings.users[rows], kind="stable")]
        counts = np.bincount(ratings.users[rows], minlength=ratings.num_users)
        self.items = torch.from_numpy(ratings.items[rows])
        self.ratings = torch.from_numpy(ratings.ratings[rows])
        self.begins = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))

    def pages(self, users: Tensor) -> Pages:
        self._move(users.device)
        begin, end = self.begins[users], self.begins[users + 1]
        counts = (end - begin + PAGE - 1) // PAGE
        owner = torch.repeat_interleave(counts)
        number = torch.arange(len(owner), device=users.device) - (counts.cumsum(0) - counts)[owner]
        first = begin[owner] + PAGE * number
        at = first[:, None] + torch.arange(PAGE, device=users.device)
        real = at < end[owner, None]
        at = at.where(real, 0)
        return Pages(self.items[at].where(real, 0), self.ratings[at], real, owner, len(users))

    def windows(self, begins: Tensor, ends: Tensor, length: int, filler: int) -> Tensor:
        """The `length` items before each of `ends`, the newest first, none before `begins`."""
        self._move(ends.device)
        at = ends[:, None] - 1 - torch.arange(length, device=ends.device)
        real = at >= begins[:, None]
        return self.items[at.where(real, 0)].where(real, filler)

    def _move(self, device: torch.device) -> None:
        if self.items.device != device:  # once: it then stays there
            self.items, self.ratings = self.items.to(device), self.ratings.to(device)
            self.begins = self.begins.to(device)


def one_user(items: Tensor, ratings: Tensor) -> Pages:
    """A single history as one long page."""
    real = torch.ones(1, len(items), dtype=torch.bool)
    return Pages(items[None], ratings[None], real, torch.zeros(1, dtype=torch.long), 1)
