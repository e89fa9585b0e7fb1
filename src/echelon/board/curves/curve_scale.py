"""Where steps are on other axes, for a run of any length. The meaning of the axes is that of
`runs.curves`: samples and time begin at zero, and steps between two lines are between their places.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.board.curves.curve_pyramid import LEVEL_SIZES, CurvePyramid, SeriesView
from echelon.board.curves.line_columns import AXIS
from echelon.runs.curves import estimate_steps_per_epoch
from echelon.runs.history import RunHistory, read_history
from echelon.runs.run_folder import Run
from echelon.runs.status import FolderFacts

Floats = NDArray[np.float64]

AXES = ("step", "samples", "epoch", "time", "clock")
"""`time` is seconds of training, `clock` seconds since 1970."""
_MAX_PLACES = 4096
"""In a window. Between them places are interpolated: an error of less than a pixel."""


@dataclass(frozen=True)
class AxisScale:
    """Converts steps to an axis: linear between places, and beyond the first and the last."""

    axis: str
    """`step` where the run does not say where its steps are on the axis that was asked for."""
    steps: Floats
    """Ascending."""
    places: Floats
    """Not descending."""

    def convert(self, steps: Floats) -> Floats:
        """Return the places of steps. A later step is never before an earlier one."""
        if len(self.steps) < 2 or not len(steps):
            return steps
        places: Floats = np.interp(steps, self.steps, self.places)
        for end, inner in ((0, 1), (-1, -2)):
            is_beyond = steps < self.steps[0] if end == 0 else steps > self.steps[-1]
            if is_beyond.any():
                width = self.steps[end] - self.steps[inner]
                slope = (self.places[end] - self.places[inner]) / width
                distance = steps[is_beyond] - self.steps[end]
                places[is_beyond] = self.places[end] + slope * distance
        return places

    def find_steps(self, from_x: float, to_x: float) -> tuple[float, float]:
        """Return the first and the last step of the places around a window."""
        first = int(np.searchsorted(self.places, from_x)) - 1
        last = int(np.searchsorted(self.places, to_x, side="right"))
        count = len(self.steps)
        return float(self.steps[max(0, first)]), float(self.steps[min(last, count - 1)])


class _KnownScale(NamedTuple):
    """The scale of a whole run, and what it was made of."""

    key: tuple[object, ...]
    steps: Floats
    values: Floats
    scale: AxisScale


_STEP_SCALE = AxisScale("step", np.empty(0), np.empty(0))


def build_scale(
    pyramid: CurvePyramid, axis: str, from_x: float | None = None, to_x: float | None = None
) -> AxisScale:
    """Return the scale of an axis for a run. In a window it is as exact as the window is narrow."""
    if axis == "epoch":
        size = _find_steps_per_epoch(pyramid)
        return AxisScale(axis, np.array([0, size]), np.array([0.0, 1])) if size else _STEP_SCALE
    name = "samples" if axis == "samples" else "time"
    series = None if axis == "step" else pyramid.get_series((AXIS, name))
    if series is None or not series.count:
        return _STEP_SCALE
    convert, origin = _make_conversion(pyramid, axis)
    key = (axis, pyramid.version, *_sign(pyramid.run.history_file))
    known: _KnownScale | None = pyramid.known_scale
    if known is None or known.key != key:
        steps, values = _read_places(series, -np.inf, np.inf)
        scale = _make_scale(axis, steps, convert(values), origin)
        known = pyramid.known_scale = _KnownScale(key, steps, values, scale)
    _, steps, values, whole = known
    if series.count == len(steps) or (from_x is None and to_x is None):
        return whole
    window = whole.find_steps(
        -np.inf if from_x is None else from_x, np.inf if to_x is None else to_x
    )
    finer_steps, finer_values = _read_places(series, *window)
    return _make_scale(
        axis,
        np.concatenate([steps, finer_steps]),
        convert(np.concatenate([values, finer_values])),
        origin,
    )


def _read_places(series: SeriesView, first: float, last: float) -> tuple[Floats, Floats]:
    """Return steps and values between two steps: all points, or of many the last of each bucket."""
    level = series.find_highest_level(_MAX_PLACES // 4)
    numbers = series.list_all(level)
    parts = []
    while True:
        records = series.take(level, numbers)
        low, high, value = (records[i] for i in ((0, 1, 4) if level else (0, 0, 1)))
        is_near = (high >= first) & (low <= last)
        near = numbers[is_near]
        lower = max(0, level - 1)
        if level == 0 or len(near) * (LEVEL_SIZES[level] // LEVEL_SIZES[lower]) > _MAX_PLACES:
            parts.append((high[is_near], value[is_near]))
            near, lower = near[:0], 0
        if level == 0:
            break
        numbers, level = series.list_parts(level, near, lower), lower
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _make_scale(axis: str, steps: Floats, places: Floats, origin: float) -> AxisScale:
    """Return a scale that rises, whatever the lines say: of equal steps the last counts, and time
    and samples do not go back."""
    steps, places = np.concatenate([[0.0], steps]), np.concatenate([[origin], places])
    if (steps[1:] < steps[:-1]).any():
        order = np.argsort(steps, kind="stable")
        steps, places = steps[order], places[order]
    is_last = np.concatenate([steps[1:] > steps[:-1], [True]])
    return AxisScale(axis, steps[is_last], np.maximum.accumulate(places[is_last]))


# --- what the run says ---


def _make_conversion(pyramid: CurvePyramid, axis: str) -> tuple[Callable[[Floats], Floats], float]:
    """Return a function from samples or times of lines to places, and the place of step 0."""
    if axis == "samples":
        return lambda samples: samples, 0.0
    facts = pyramid.facts
    begun = facts.begun if facts.begun is not None else facts.first_time or 0.0
    if axis == "clock":
        return lambda times: times, begun
    phases = _read_history(*_sign(pyramid.run.history_file), pyramid.run).training_phases
    if not phases:
        return lambda times: np.maximum(times - begun, 0.0), 0.0

    def count_trained_s(times: Floats) -> Floats:
        trained_s = np.zeros(len(times))
        for phase in phases:
            assert phase.trained_since is not None
            trained_s += np.clip(times - phase.trained_since, 0.0, phase.trained_s)
        return trained_s

    return count_trained_s, 0.0


def _find_steps_per_epoch(pyramid: CurvePyramid) -> float | None:
    run = pyramid.run
    trainer, total_steps = _read_plan(*_sign(run.config_file), *_sign(run.status_file), run)
    return estimate_steps_per_epoch(trainer, total_steps, pyramid.facts.steps_per_epoch)


def _sign(path: Path) -> tuple[int, int]:
    """Return what changes when a file does."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return 0, 0


@functools.lru_cache(512)
def _read_history(mtime_ns: int, size: int, run: Run) -> RunHistory:
    # Whether the last start has ended does not matter: no line is later than its end.
    return read_history(run, is_running=True)


@functools.lru_cache(512)
def _read_plan(
    config_mtime_ns: int, config_size: int, status_mtime_ns: int, status_size: int, run: Run
) -> tuple[dict[str, Any], int | None]:
    """Return the settings of the trainer and how many steps are to be made."""
    trainer: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        trainer = run.read_config_json().get("trainer")
    return trainer if isinstance(trainer, dict) else {}, FolderFacts.read(run).total_steps
