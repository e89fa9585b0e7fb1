"""Splitting ratings into a training and a held-out part.

The same seed gives the same split on any machine: only the raw bits of the generator are used,
which numpy promises to keep, unlike its methods for choosing.
"""

from __future__ import annotations

import numpy as np

from echelon.errors import EchelonError, Fault
from echelon.recipes.movielens.data.ratings import Array, Ratings


def split_randomly(n: int, held_out: float, seed: int) -> tuple[Array, Array]:
    """Return the row numbers to train on and to hold out, each ascending."""
    if not 0 <= held_out < 1:
        raise EchelonError(
            Fault(f"{held_out:g} of the ratings is to be held out", "give at least 0, less than 1")
        )
    count = round(n * held_out)
    is_held_out = np.zeros(n, bool)
    if count:
        is_held_out[np.argpartition(_draw_random_bits(n, seed), count)[:count]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def split_newest(ratings: Ratings, seed: int, last: int = 1) -> tuple[Array, Array]:
    """Return the row numbers to train on and to hold out: the `last` newest ratings of each user.

    Many ratings are made within one second; the seed decides which of those is the newest. A user
    with no more than `last` ratings is not held out.
    """
    if last < 1:
        raise EchelonError(Fault(f"the last {last} ratings are to be held out", "give at least 1"))
    users = np.asarray(ratings.users)
    rows = np.flatnonzero(_find_newest_candidates(users, np.asarray(ratings.times), last))
    newest_first = np.lexsort(
        (_draw_random_bits(len(rows), seed), -ratings.times[rows], users[rows])
    )
    rows = rows[newest_first]
    owner = users[rows]
    begins = np.searchsorted(owner, owner)
    is_held_out = np.zeros(len(users), bool)
    is_held_out[rows[np.arange(len(rows)) - begins < last]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _find_newest_candidates(users: Array, times: Array, last: int) -> Array:
    """Return which ratings are as late as their user's `last`-newest.

    A sort of plain values finds these and leaves few rows for the sort by several keys, which takes
    ten times as long.
    """
    since = times - times.min(initial=0)
    span = int(since.max(initial=0)) + 1
    counts = np.bincount(users)
    if len(counts) * span >= 1 << 63:  # times that are no seconds: their rank will do
        since = np.unique(times, return_inverse=True)[1]
        span = len(times) + 1
    key = users * np.int64(span) + since
    ordered = np.sort(key)
    enough = counts > last
    threshold = np.full(len(counts), np.iinfo(np.int64).max)
    threshold[enough] = ordered[(np.cumsum(counts) - last)[enough]]
    late: Array = key >= threshold[users]
    return late


def _draw_random_bits(n: int, seed: int) -> Array:
    """Return n random integers for this seed."""
    return np.asarray(np.random.PCG64(seed).random_raw(n))
