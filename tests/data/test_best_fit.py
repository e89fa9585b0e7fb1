"""Pieces in rows: as best-fit decreasing puts them one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.best_fit import pack_rows, plan_rows


def fit_one_by_one(lengths: list[int], row_length: int) -> list[int]:
    """Return what is left in each row."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [(space, row) for row, space in enumerate(left) if space >= length]
        if fits:
            left[min(fits)[1]] -= length
        else:
            left.append(row_length - length)
    return sorted(left)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n)))))
def test_rows_are_those_of_best_fit_decreasing(given: tuple[int, list[int]]) -> None:
    row_length, lengths = given
    order, starts = pack_rows(np.array(lengths, np.int64), row_length)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [order[begin:end].tolist() for begin, end in pairwise(starts.tolist())]
    left = [row_length - sum(lengths[piece] for piece in row) for row in rows]
    assert min(left, default=0) >= 0
    assert sorted(left) == fit_one_by_one(lengths, row_length)


@pytest.mark.parametrize("row_length", [64, 1000])
def test_a_large_section_takes_few_steps(row_length: int) -> None:
    """Steps grow with the lengths that occur, not with the pieces."""
    counts = np.full(row_length + 1, 1000)
    counts[0] = 0
    plan = plan_rows(counts, row_length)
    assert len(plan.placements) < 8 * row_length
    pieces = sum(each.rows * each.per_row for each in plan.placements)
    assert pieces == 1000 * row_length
    assert plan.rows * row_length < 1.002 * (counts * np.arange(row_length + 1)).sum()


def test_the_packing_is_pinned() -> None:
    """A resumed run goes on with these samples."""
    order, starts = pack_rows(np.array([3, 7, 2, 2, 5, 1, 3, 2, 6]), 8)
    assert order.tolist() == [1, 8, 2, 4, 0, 6, 3, 7, 5]
    assert starts.tolist() == [0, 1, 3, 5, 9]
