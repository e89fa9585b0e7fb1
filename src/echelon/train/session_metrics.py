"""What a user's loop logs, until a line of metrics is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from echelon.parallel.process_group import RankGroup

RankSums = dict[str, list[float]]
"""The sum and the weight of what one rank has logged, by name."""


class MetricSums:
    """Sums of logged numbers and of their weights, by name.

    Tensors stay on their device until a line is due, as reading them would make a GPU wait.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float | Tensor]] = {}

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

    def gather(self, group: RankGroup) -> list[RankSums]:
        """Return the sums of every rank on rank 0, and nothing on other ranks. A collective."""
        own = {name: [float(total), float(n)] for name, (total, n) in self._sums.items()}
        return [own] if group.world.size == 1 else group.gather_json(own)

    def clear(self) -> None:
        """Begin the next line."""
        self._sums = {}


def merge_sums(of_ranks: Iterable[RankSums]) -> RankSums:
    """Return the sums over all ranks."""
    sums: RankSums = {}
    for of_rank in of_ranks:
        for name, (total, weight) in of_rank.items():
            known = sums.get(name, [0.0, 0.0])
            sums[name] = [known[0] + total, known[1] + weight]
    return sums
