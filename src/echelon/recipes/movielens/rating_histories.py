"""The rating history of every user, grouped by user and gathered by index on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.recipes.movielens.data import Ratings
from echelon.recipes.movielens.data.ratings import Array

PAGE_LENGTH = 64
"""Some users have rated twenty movies, some thousands. Pages of equal length waste less memory than
padding to the longest, and still multiply as matrices."""


class RatingPages(NamedTuple):
    """The ratings of some users, in pages of equal length; a user has as many pages as needed."""

    items: Tensor
    """[pages, PAGE_LENGTH]; 0 where `is_rating` is false."""
    ratings: Tensor
    is_rating: Tensor
    owner: Tensor
    """[pages]: the user of each page, as a position among the requested users."""
    num_users: int


class RatingHistories:
    """The histories of all users. They are kept outside of the model: as buffers, DDP would
    broadcast them at every step."""

    def __init__(self, ratings: Ratings, rows: Array) -> None:
        """Sort the given rows of the ratings by user, and by time within a user."""
        rows = rows[np.argsort(ratings.times[rows], kind="stable")]
        rows = rows[np.argsort(ratings.users[rows], kind="stable")]
        counts = np.bincount(ratings.users[rows], minlength=ratings.num_users)
        self.items = torch.from_numpy(ratings.items[rows])
        self.ratings = torch.from_numpy(ratings.ratings[rows])
        self.begins = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))

    def gather_pages(self, users: Tensor) -> RatingPages:
        """Return all ratings of these users."""
        self._move_to(users.device)
        begin, end = self.begins[users], self.begins[users + 1]
        counts = (end - begin + PAGE_LENGTH - 1) // PAGE_LENGTH
        owner = torch.repeat_interleave(counts)
        number = torch.arange(len(owner), device=users.device) - (counts.cumsum(0) - counts)[owner]
        first = begin[owner] + PAGE_LENGTH * number
        at = first[:, None] + torch.arange(PAGE_LENGTH, device=users.device)
        real = at < end[owner, None]
        at = at.where(real, 0)
        return RatingPages(self.items[at].where(real, 0), self.ratings[at], real, owner, len(users))

    def gather_windows(self, starts: Tensor, ends: Tensor, length: int, filler: int) -> Tensor:
        """Return the `length` items before each position in `ends`, the newest first; `filler`
        before `begins`."""
        self._move_to(ends.device)
        at = ends[:, None] - 1 - torch.arange(length, device=ends.device)
        real = at >= starts[:, None]
        return self.items[at.where(real, 0)].where(real, filler)

    def _move_to(self, device: torch.device) -> None:
        """Move the data to a device; it stays there, so this happens once."""
        if self.items.device != device:
            self.items, self.ratings = self.items.to(device), self.ratings.to(device)
            self.begins = self.begins.to(device)


def make_single_page(items: Tensor, ratings: Tensor) -> RatingPages:
    """Return one user's history as a single page."""
    real = torch.ones(1, len(items), dtype=torch.bool)
    return RatingPages(items[None], ratings[None], real, torch.zeros(1, dtype=torch.long), 1)
