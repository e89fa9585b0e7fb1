"""Best-fit decreasing: pieces of different lengths in as few rows of a fixed length as it finds.

The longest piece comes first, and each goes where the least is left that still takes it. Done piece
by piece this needs a search tree and a step of Python for each. Pieces of one length are alike, as
are rows with as much left, so here they move in groups: a few steps for each length that occurs.
The rows are as many as piece by piece.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Placement(NamedTuple):
    """Pieces of one length that go into neighbouring rows, as many into each."""

    first_row: int
    rows: int
    per_row: int


class RowPlan:
    """Where pieces go, the longest first; of one length, in any order."""

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length
        self.rows = 0
        self.placements: list[Placement] = []
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By what is left in a row: the first and the number of neighbouring rows."""
        self._spaces: list[int] = []
        """The keys of `_free`, ascending."""

    def place(self, length: int, count: int) -> None:
        """Put so many pieces of a length, which is not longer than those before, into rows."""
        filled: list[tuple[int, Placement]] = []
        at = bisect_left(self._spaces, length)
        while count and at < len(self._spaces):
            ranges = self._free[space := self._spaces[at]]
            while count and ranges:
                first, rows = ranges.pop()
                for placement in _fill_rows(first, rows, space // length, count):
                    filled.append((space - placement.per_row * length, placement))
                    count -= placement.rows * placement.per_row
                    first, rows = first + placement.rows, rows - placement.rows
                if rows:
                    ranges.append((first, rows))
            if not ranges:
                del self._free[space], self._spaces[at]
        if count:
            per_row = self.row_length // length
            rows = -(-count // per_row)
            for placement in _fill_rows(self.rows, rows, per_row, count):
                filled.append((self.row_length - placement.per_row * length, placement))
            self.rows += rows
        # Not before: what is left in a filled row takes no other piece of this length.
        for space, placement in filled:
            self.placements.append(placement)
            if space:
                if space not in self._free:
                    self._free[space] = []
                    insort(self._spaces, space)
                self._free[space].append(placement[:2])


def _fill_rows(first: int, rows: int, per_row: int, count: int) -> Iterator[Placement]:
    """Yield how pieces fill some of these rows, each of which takes `per_row`. A row takes all it
    can before the next one does: while it takes more, it is the one with the least left."""
    full, rest = divmod(min(count, rows * per_row), per_row)
    if full:
        yield Placement(first, full, per_row)
    if rest:
        yield Placement(first + full, 1, rest)


def plan_rows(counts: NDArray[np.int64], row_length: int) -> RowPlan:
    """Return where to put `counts[n]` pieces of each length n, from 1 to `row_length`."""
    plan = RowPlan(row_length)
    for length in np.flatnonzero(counts)[::-1].tolist():
        plan.place(length, int(counts[length]))
    return plan


def pack_rows(
    lengths: NDArray[np.int64], row_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the pieces row by row, and where each row begins among them, with the
    end. Lengths are from 1 to `row_length`."""
    plan = plan_rows(np.bincount(lengths, minlength=row_length + 1), row_length)
    longest_first = (row_length - lengths).argsort(kind="stable")
    row_of = [
        np.repeat(np.arange(each.first_row, each.first_row + each.rows), each.per_row)
        for each in plan.placements
    ]
    rows = np.concatenate([np.zeros(0, np.int64), *row_of])
    starts = np.zeros(plan.rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=plan.rows), out=starts[1:])
    return longest_first[rows.argsort(kind="stable")], starts
