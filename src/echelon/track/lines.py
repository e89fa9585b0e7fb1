"""A line of metrics, and the names its numbers have wherever they are drawn."""

from __future__ import annotations

import math
from typing import Any, Protocol

from echelon.errors import Exit

Line = dict[str, Any]
"""As in metrics.jsonl: `step`, `epoch`, and what was measured there."""

_AXES = ("step", "epoch", "samples")
_CLOCK = "time"


class Tracker(Protocol):
    """Takes the lines of a run. It may fail to keep them, and must never end a training."""

    def log(self, line: Line) -> None: ...

    def close(self, outcome: Exit) -> dict[str, str]:
        """What the last words of the run say of it, by their titles."""
        ...


def axes(line: Line) -> Line:
    """What a curve can be drawn over."""
    return {key: line[key] for key in _AXES if key in line}


def curves(line: Line) -> dict[str, float]:
    """`loss` → `train/loss`, `eval_loss` → `eval/loss`: a panel each, on every tracker."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in line.items()
        if key not in (*_AXES, _CLOCK)
    }


def better(value: float, best: float | None, best_is: str) -> bool:
    """NaN is better than nothing only by mistake: no later value would ever be better than it."""
    if not math.isfinite(value):
        return False
    if best is None or not math.isfinite(best):  # as a snapshot may say that is there already
        return True
    return value < best if best_is == "min" else value > best
