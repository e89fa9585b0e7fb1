"""Curves made readable: less noise, and no more points than can be seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from echelon.tracking.summary import needs_log_scale

MIN_POINTS_TO_SMOOTH = 20
"""Fewer points are each worth seeing."""
_MIN_ROUGHNESS = 4.0
"""So many times its whole range a smooth curve does not go up and down."""
_WINDOWS = 60
"""A smoothed curve forgets after about this part of its length."""


def smooth_values(values: Sequence[float], smooth: float, is_log: bool = False) -> list[float]:
    """Return the mean of the exponential averages from either end, so that a fall is not drawn
    later than it was. On a logarithmic scale the logarithms are averaged: a long fall would be
    drawn above its own end."""
    if is_log:
        return [math.exp(v) for v in smooth_values([math.log(v) for v in values], smooth)]
    there, back = (
        _compute_exponential_average(values, smooth),
        _compute_exponential_average(values[::-1], smooth)[::-1],
    )
    return [a / 2 + b / 2 for a, b in zip(there, back, strict=True)]


def _compute_exponential_average(values: Sequence[float], smooth: float) -> list[float]:
    """Return the exponential average, without the pull of an invented first value."""
    total, weight, averages = 0.0, 0.0, []
    for value in values:
        total = smooth * total + (1 - smooth) * value
        weight = smooth * weight + (1 - smooth)
        averages.append(total / weight)
    return averages


def choose_smoothing_factor(values: Sequence[float]) -> float:
    """Return how much smoothing these values need; 0 if they are smooth or few."""
    if len(values) < MIN_POINTS_TO_SMOOTH:
        return 0.0
    low, high = min(values), max(values)
    if needs_log_scale(low, high):
        values = [math.log(v) for v in values]
        low, high = min(values), max(values)
    path = sum(abs(b - a) for a, b in itertools.pairwise(values))
    if high == low or path / (high - low) < _MIN_ROUGHNESS:
        return 0.0
    return 1 - 1 / max(4.0, len(values) / _WINDOWS)


def select_point_indices(ys: Sequence[float], limit: int, required_index: int) -> list[int]:
    """Return indices of at most about so many points: the lowest and the highest of every piece,
    so that no spike is lost, and ``required_index``."""
    if len(ys) <= limit:
        return list(range(len(ys)))
    pieces = max(1, limit // 2)
    chosen = {0, len(ys) - 1, required_index}
    for piece in range(pieces):
        mine = range(piece * len(ys) // pieces, (piece + 1) * len(ys) // pieces)
        chosen |= {min(mine, key=ys.__getitem__), max(mine, key=ys.__getitem__)}
    return sorted(chosen)
