"""Which trials are not worth going on with: wandb's hyperband, trial by trial as they come."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.sweep.file import Early


def stops(early: Early, mine: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Whether a trial stops after its last evaluation; in all histories less is better.

    It is judged at the highest band that it has reached, among all that were ever there, and goes
    on when it is one of the best 1/eta of them. So it may be stopped late, when better ones come:
    nobody waits for others, as in ASHA.
    """
    band = max((band for band in early.bands if band <= len(mine)), default=0)
    if band == 0:
        return False
    there = sorted([mine[band - 1], *(h[band - 1] for h in others if len(h) >= band)])
    if len(there) < early.eta and not early.strict:
        return False
    go_on = max(1, int(len(there) / early.eta))
    return mine[band - 1] > there[go_on - 1]
