"""Which rank all others wait for, from the heartbeats of all."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

RankHeartbeats = list[dict[str, Any]]
"""What an agent knows of its living ranks: rank, beats, step, begun, still (seconds without a
beat), stopped."""

_STARTING_BEATS = 6
"""A rank with no more heartbeats than this is still starting, and the others may wait for it."""
_STARTING_PATIENCE = 8
"""So many times longer, but less than their collectives wait (parallel/process_group.py). It is not
shorter for a small `launch.hang_s`: nothing tells a first step that is slow (CUDA and its libraries
load, loader processes start) from one that hangs."""


class HungRank(NamedTuple):
    """The rank for which all others wait."""

    rank: int
    limit_s: float


def find_hung_rank(heartbeats: RankHeartbeats, hang_s: float) -> HungRank | None:
    """Return the rank for which all others wait, if no rank has moved for `hang_s` seconds.

    It is the one with the fewest heartbeats, or one that is halted. While a rank is starting, the
    limit is longer; while any rank moves, the world is only slow.
    """
    if not hang_s or not any(each["begun"] for each in heartbeats):
        return None
    limit_s = hang_s
    if any(each["beats"] <= _STARTING_BEATS for each in heartbeats):
        limit_s *= _STARTING_PATIENCE if len(heartbeats) > 1 else math.inf
    if any(each["still"] < limit_s for each in heartbeats):  # that rank is only slow
        return None
    return HungRank(
        min(heartbeats, key=lambda each: (not each["stopped"], each["beats"]))["rank"], limit_s
    )
