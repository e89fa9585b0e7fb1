"""Held-out ratings: how many, whose, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.errors import EchelonError
from echelon.recipes.movielens.data import Ratings, split_newest, split_randomly
from echelon.recipes.movielens.data.synthetic import make_synthetic


@pytest.mark.parametrize(("n", "held_out"), [(1000, 0.1), (7, 0.5), (10, 0.0), (1, 0.4)])
def test_a_random_split_is_a_partition(n: int, held_out: float) -> None:
    train, held = split_randomly(n, held_out, seed=0)
    assert len(held) == round(n * held_out)
    assert sorted([*train, *held]) == list(range(n))
    assert (np.diff(train) > 0).all()
    assert (np.diff(held) > 0).all()


def test_a_random_split_depends_on_its_seed_alone() -> None:
    assert (
        split_randomly(20, 0.25, seed=0)[1].tolist() == split_randomly(20, 0.25, seed=0)[1].tolist()
    )
    assert (
        split_randomly(20, 0.25, seed=0)[1].tolist() != split_randomly(20, 0.25, seed=1)[1].tolist()
    )
    counts = sum(
        np.bincount(split_randomly(10, 0.3, seed)[1], minlength=10) for seed in range(2000)
    )
    assert counts.sum() == 6000  # type: ignore[union-attr]
    assert abs(counts - 600).max() < 120, "every row as often, within five deviations"  # type: ignore[attr-defined]


@pytest.mark.parametrize("held_out", [-0.1, 1.0, 2.0])
def test_a_fraction_out_of_range(held_out: float) -> None:
    with pytest.raises(EchelonError, match="at least 0, less than 1"):
        split_randomly(10, held_out, seed=0)


def make_ratings(users: list[int], times: list[int]) -> Ratings:
    n = len(users)
    return Ratings(
        users=np.array(users, np.int32),
        items=np.arange(n, dtype=np.int32),
        ratings=np.ones(n, np.float32),
        times=np.array(times, np.int64),
        user_ids=np.arange(max(users) + 1),
        item_ids=np.arange(n),
        fingerprint="",
    )


def test_the_last_of_each_user_is_held_out_in_any_order() -> None:
    ratings = make_ratings([1, 0, 1, 0, 2, 1], [50, 9, 70, 8, 3, 60])
    train, held = split_newest(ratings, seed=0)
    assert held.tolist() == [1, 2], "user 2 has one rating, and keeps it"
    assert train.tolist() == [0, 3, 4, 5]
    assert split_newest(ratings, seed=0, last=2)[1].tolist() == [2, 5]


def test_ties_are_broken_by_the_seed() -> None:
    ratings = make_ratings([0] * 5, [7, 7, 7, 7, 1])
    held = [split_newest(ratings, seed)[1].tolist() for seed in range(40)]
    assert {tuple(rows) for rows in held} == {(0,), (1,), (2,), (3,)}
    assert held == [split_newest(ratings, seed)[1].tolist() for seed in range(40)]


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("factor", [1, 10**17])
def test_the_split_equals_sorting_user_by_user(last: int, factor: int) -> None:
    """Few different times, so that ties are many; and times whose span overflows a product."""
    ratings = make_synthetic(3000, 150, 100, seed=2)
    times = ratings.times % 13 * factor
    ratings = make_ratings(ratings.users.tolist(), times.tolist())
    _, held = split_newest(ratings, seed=5, last=last)
    for user in range(ratings.num_users):
        rows = np.flatnonzero(ratings.users == user)
        mine = np.intersect1d(rows, held)
        assert len(mine) == (last if len(rows) > last else 0)
        rest = np.setdiff1d(rows, mine)
        assert not len(mine) or times[mine].min() >= times[rest].max()


def test_holding_out_less_than_one_is_refused() -> None:
    with pytest.raises(EchelonError, match="at least 1"):
        split_newest(make_ratings([0], [1]), seed=0, last=0)
