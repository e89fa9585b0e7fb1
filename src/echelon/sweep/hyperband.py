"""Which trials are not worth going on with: wandb's hyperband, trial by trial as they come."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.sweep.sweep_file import Hyperband


def find_band(hyperband: Hyperband, evaluations: int) -> int:
    """The highest one that a trial has reached; 0 before the first."""
    return max((band for band in hyperband.bands if band <= evaluations), default=0)


def should_stop(hyperband: Hyperband, own_value: float, other_values: Sequence[float]) -> bool:
    """Whether a trial stops, by its value and those of all that were ever at its band; less is
    better. It goes on when it is one of the best 1/eta of them. It is asked after every evaluation,
    so it may be stopped late, when better ones come: nobody waits for others, as in ASHA."""
    values = sorted([own_value, *other_values])
    if len(values) < hyperband.eta and not hyperband.strict:
        return False
    survivors = max(1, int(len(values) / hyperband.eta))
    return own_value > values[survivors - 1]
