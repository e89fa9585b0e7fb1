"""What an experiment's own `evaluate` returns, joined over the ranks.

Every rank evaluates its share and returns sums with their counts. A plain number could not be
joined: the mean of two accuracies is right only for equal shares, and that of two F1 scores never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from echelon.errors import EchelonError, Fault

Totals = dict[str, list[float]]
"""By name: the sum over the samples of a rank, and their count."""


def convert_to_totals(returned: Any) -> Totals:
    """Return what `evaluate` returned as sums and counts. Raises all faults in it at once."""
    if not isinstance(returned, Mapping) or not returned:
        what = "nothing" if not returned else f"something of type {type(returned).__name__}"
        raise EchelonError(
            Fault(
                f"the experiment's evaluate returned {what}",
                'let it return a dict of sums and counts: {"accuracy": (right, samples)}',
            )
        )
    pairs = {str(name): _convert_pair(value) for name, value in returned.items()}
    faults = [
        Fault(
            f"the experiment's evaluate returned {name}={returned[name]!r}, but a number of the "
            "samples of one process cannot be joined with those of the others",
            f"return the sum over the samples and their count: {{{name!r}: (total, count)}}",
        )
        for name, pair in pairs.items()
        if pair is None
    ]
    if faults:
        raise EchelonError(*faults)
    return {name: pair for name, pair in pairs.items() if pair is not None}


def _convert_pair(value: Any) -> list[float] | None:
    """Return a pair of numbers, which may be tensors; None for anything else."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence) or len(value) != 2:
        return None
    try:
        return [float(part) for part in value]
    except (TypeError, ValueError):
        return None


def join_totals(rank_totals: Sequence[Totals]) -> dict[str, float]:
    """Return the means over the samples of all ranks."""
    first = rank_totals[0]
    for rank, totals in enumerate(rank_totals):
        if totals.keys() != first.keys():
            raise EchelonError(
                Fault(
                    f"the experiment's evaluate returned {', '.join(totals)} on rank {rank}, but "
                    f"{', '.join(first)} on rank 0",
                    "return the same names on every rank; where it had no samples: (0.0, 0)",
                )
            )
    return {name: _divide(name, [totals[name] for totals in rank_totals]) for name in first}


def _divide(name: str, pairs: Sequence[Sequence[float]]) -> float:
    total, count = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if count == 0:
        raise EchelonError(
            Fault(
                f"the experiment's evaluate returned {name} over 0 samples on every rank",
                "return the number of samples that the sum is over",
            )
        )
    return total / count
