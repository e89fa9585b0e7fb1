"""A line of metrics, and the names its numbers have wherever they are drawn."""

from __future__ import annotations

import math
from typing import Protocol

from echelon.errors import Exit
from echelon.runs.metrics_file import MetricsLine

_AXES = ("step", "epoch", "samples")
_TIME = "time"


class Tracker(Protocol):
    """Takes the lines of a run. It may fail to keep them, and must never end a training."""

    def log(self, line: MetricsLine) -> None: ...

    def close(self, outcome: Exit) -> dict[str, str]:
        """What the last words of the run say of it, by their titles."""
        ...


def select_axes(line: MetricsLine) -> MetricsLine:
    """What a curve can be drawn over."""
    return {key: line[key] for key in _AXES if key in line}


def name_curves(line: MetricsLine) -> dict[str, float]:
    """`loss` → `train/loss`, `eval_loss` → `eval/loss`: a panel each, on every tracker."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in line.items()
        if key not in (*_AXES, _TIME)
    }


def format_speed(line: MetricsLine) -> list[str]:
    """How fast it goes, for a person: the most telling first."""
    texts = []
    if "samples_per_s" in line:
        texts.append(f"{line['samples_per_s']:,.0f} samples/s")
    if "step_ms" in line:
        texts.append(f"{format_three_digits(line['step_ms'])} ms/step")
    if "mfu" in line:
        texts.append(f"MFU {line['mfu']:.0%}")
    if "memory_gb" in line:
        texts.append(f"{format_three_digits(line['memory_gb'])} GB")
    return texts


def format_three_digits(value: float) -> str:
    """0.0123, 1.23, 123, 12,345."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def is_better(value: float, best: float | None, best_is: str) -> bool:
    """NaN is better than nothing only by mistake: no later value would ever be better than it."""
    if not math.isfinite(value):
        return False
    if best is None or not math.isfinite(best):  # as a snapshot may say that is there already
        return True
    return value < best if best_is == "min" else value > best
