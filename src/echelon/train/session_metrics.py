"""What a user's loop logs, until a line of metrics is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.parallel.process_group import RankGroup

RankSums = dict[str, list[float]]
"""The sum and the weight of what one rank has logged, by name."""


_OpenSums = dict[str, list[float | Tensor]]


class MetricSums:
    """Sums of logged numbers and of their weights, by name.

    Tensors stay on their device until lines are written, as reading them would make a GPU wait.
    """

    def __init__(self) -> None:
        self._sums: _OpenSums = {}
        self._line_sums: list[_OpenSums] = []
        """Of the lines that are due and not written yet."""

    def restore(self, of_ranks: Sequence[RankSums], rank: int, world_size: int) -> None:
        """Continue from the sums of a snapshot. On another number of ranks, rank 0 has them all."""
        if len(of_ranks) == world_size:
            self._sums = {name: list(pair) for name, pair in of_ranks[rank].items()}
        elif rank == 0:
            self._sums = {name: list(pair) for name, pair in merge_sums(of_ranks).items()}

    def add(self, numbers: Mapping[str, float | Tensor], weight: float | Tensor) -> None:
        """Add numbers of one iteration."""
        if isinstance(weight, Tensor):
            weight = weight.double()  # a count of half precision would stop to grow
        elif not weight:
            return
        for name, value in numbers.items():
            total, weights = self._sums.get(name, (0.0, 0.0))
            exact = value.double() if isinstance(value, Tensor) else value
            term = exact * weight
            if isinstance(weight, Tensor):  # the mean over nothing is not a number
                term = torch.where(weight > 0, term, torch.zeros_like(weight))
            self._sums[name] = [total + term, weights + weight]

    def add_sums(self, sums: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add sums of several iterations with the sums of their weights."""
        for name, (total, weight) in sums.items():
            known, weights = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = [known + total, weights + weight]

    def close_line(self) -> None:
        """End a line, and begin the next one."""
        self._line_sums.append(self._sums)
        self._sums = {}

    def gather(self, group: RankGroup, to_all: bool = False) -> GatheredSums:
        """Return the sums of all ranks on rank 0, or on all ranks, and nothing elsewhere. A
        collective: one for all lines that are due."""
        own = [_read_sums(sums) for sums in (*self._line_sums, self._sums)]
        self._line_sums = []
        of_ranks = [own] if group.world.size == 1 else group.gather_json(own, to_all)
        if not of_ranks:
            return GatheredSums([], [])
        *lines, rest = zip(*of_ranks, strict=True)
        return GatheredSums([merge_sums(line) for line in lines], list(rest))


class GatheredSums(NamedTuple):
    """What all ranks have logged."""

    lines: list[RankSums]
    """The sums over all ranks for each line that is due."""
    of_ranks: list[RankSums]
    """What belongs to the next line, rank by rank."""


def _read_sums(sums: _OpenSums) -> RankSums:
    return {name: [float(total), float(weight)] for name, (total, weight) in sums.items()}


def merge_sums(of_ranks: Iterable[RankSums]) -> RankSums:
    """Return the sums over all ranks."""
    sums: RankSums = {}
    for of_rank in of_ranks:
        for name, (total, weight) in of_rank.items():
            known = sums.get(name, [0.0, 0.0])
            sums[name] = [known[0] + total, known[1] + weight]
    return sums
