"""The names that the numbers of a line have on every tracker, and a line as text."""

from __future__ import annotations

import math
from typing import Any, Protocol

from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine

_AXES = ("step", "epoch", "samples")
_TIME = "time"


class Tracker(Protocol):
    """Takes the lines of a run. It may fail to keep them, and must never end a training."""

    def log(self, line: MetricsLine) -> None:
        """Take a line. It is called by the training loop, so it must return at once."""

    def close(self, outcome: ExitCode) -> dict[str, str]:
        """Finish, and return rows for the summary that the run prints at its end, by title."""
        ...


def select_axes(line: MetricsLine) -> MetricsLine:
    """Return what a curve can be drawn over: step, epoch, samples."""
    return {key: line[key] for key in _AXES if key in line}


def prefix_metric_names(line: MetricsLine) -> dict[str, Any]:
    """Return the numbers and media by their names on trackers: `loss` is `train/loss`, `eval_loss`
    is `eval/loss`."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in line.items()
        if key not in (*_AXES, _TIME)
    }


def format_speed(line: MetricsLine) -> list[str]:
    """Return the speed in a line as short texts, the most important first."""
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
    """Return a number with three digits: 0.0123, 1.23, 123, 12,345."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def is_better(value: float, best: float | None, best_is: str) -> bool:
    """Return whether a value is better than the best so far. A value that is not finite never is:
    no later value would be better than a NaN."""
    if not math.isfinite(value):
        return False
    if best is None or not math.isfinite(best):  # an existing snapshot may have recorded a NaN
        return True
    return value < best if best_is == "min" else value > best
