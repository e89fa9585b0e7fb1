"""Which trials are not worth going on with: wandb's hyperband, trial by trial as they come."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.sweep.file import Early


def band(early: Early, evaluations: int) -> int:
    """The highest one that a trial has reached; 0 before the first."""
    return max((band for band in early.bands if band <= evaluations), default=0)


def stops(early: Early, mine: float, others: Sequence[float]) -> bool:
    """Whether a trial stops, by its value and those of all that were ever at its band; less is
    better. It goes on when it is one of the best 1/eta of them. It is asked after every evaluation,
    so it may be stopped late, when better ones come: nobody waits for others, as in ASHA."""
    there = sorted([mine, *others])
    if len(there) < early.eta and not early.strict:
        return False
    go_on = max(1, int(len(there) / early.eta))
    return mine > there[go_on - 1]
