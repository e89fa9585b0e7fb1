"""Curves as a picture of so many pixels can show them: `query_curve`, and the answer to a page.

Of every pixel these are its lowest and its highest point, so that no extreme is lost at any zoom,
with the mean of the pixel for smoothing, and the very last point. Where there are no more points
than that, these are all. Points are in the order of the axis, whatever the order of the lines.
Those next to a window on either side are given too, so that a line runs to the edges.

A bucket of the pyramid that is narrower than a pixel counts to the pixel in which it begins. So the
extremes of a pixel are exact, and it may end less than a pixel late.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.board.curve_builds import PyramidCache
from echelon.board.curve_file import DamagedCurvesError
from echelon.board.curve_pyramid import (
    FACTOR,
    POINT_AS_BUCKET,
    CurvePyramid,
    SeriesView,
    list_children,
)
from echelon.board.curve_scale import AXES, AxisScale, build_scale
from echelon.board.line_columns import NUMBER
from echelon.board.request import BYTES_TYPE, Request, RequestError, Response, Route
from echelon.errors import suggest_nearest
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason

Floats = NDArray[np.float64]

_READ_S = 0.25
"""For new lines, in one request. What is not read by then comes with the next one."""
_MAX_WIDTH = 20_000
_MAX_CURVES = 2_000
pyramids = PyramidCache()
"""Of this process."""


@dataclass(frozen=True)
class CurvePoints:
    """What is to be drawn of a metric of a run."""

    x: Floats
    """Ascending. The points next to the window on both sides are among them."""
    y: Floats
    mean: Floats
    """For each point the mean of its pixel."""
    is_exact: bool
    """Whether these are all points of the window."""
    count: int
    """Points of the metric in the whole run, as far as it was read."""
    not_finite: int
    """Values that are NaN or infinite, and left out."""
    first_x: float | None
    last_x: float | None
    """Of the whole curve; None if it has no point."""
    axis: str
    """The axis of x: `step` if the run does not say where it is on the one that was asked for."""
    lines: int
    """Of the run that were read."""
    share: float
    """How much of the run was read, from 0 to 1."""


def query_curve(
    run: Run,
    metric: str,
    x: str = "step",
    from_x: float | None = None,
    to_x: float | None = None,
    width: int = 1500,
) -> CurvePoints:
    """Return the points of a metric between two places on an axis, for so many pixels.

    A metric that the run does not have has no points. Of a long run that is looked at for the first
    time it is what was read so far: then `share` is below 1, and another process reads on. Raises
    OSError if metrics.jsonl cannot be read.
    """
    pyramid = pyramids.refresh(run, time.monotonic() + _READ_S)
    curve = _OpenCurve.find(pyramid, metric, build_scale(pyramid, x, from_x, to_x))
    first, last = curve.get_range()
    return curve.draw(first if from_x is None else from_x, last if to_x is None else to_x, width)


class _OpenCurve(NamedTuple):
    """A curve of which it is known where it begins and ends."""

    pyramid: CurvePyramid
    series: SeriesView | None
    scale: AxisScale

    @classmethod
    def find(cls, pyramid: CurvePyramid, metric: str, scale: AxisScale) -> _OpenCurve:
        return cls(pyramid, pyramid.get_series((NUMBER, metric)), scale)

    def get_range(self) -> tuple[float, float]:
        """Return the first and the last x; (inf, -inf) without a point."""
        if self.series is None or not self.series.count:
            return math.inf, -math.inf
        ends = np.array([self.series.lowest_step, self.series.highest_step])
        first, last = self.scale.convert(ends).tolist()
        return first, last

    def draw(self, from_x: float, to_x: float, width: int) -> CurvePoints:
        """Return the points between two places."""
        first, last = self.get_range()
        window = _Window(self.scale, from_x, max(from_x, to_x), max(2, width))
        xs, ys, means, is_exact = _EMPTY
        if self.series is not None and self.series.count:
            xs, ys, means, is_exact = _draw_points(self.series, window)
        return CurvePoints(
            *(xs, ys, means, is_exact),
            self.series.count if self.series else 0,
            self.series.not_finite if self.series else 0,
            first if math.isfinite(first) else None,
            last if math.isfinite(last) else None,
            self.scale.axis,
            self.pyramid.facts.lines,
            self.pyramid.share,
        )


_EMPTY = (np.empty(0), np.empty(0), np.empty(0), True)


# --- which records a picture needs ---


class _Window:
    """A part of an axis in pixels. Its last pixel is left for the very last point."""

    def __init__(self, scale: AxisScale, from_x: float, to_x: float, width: int) -> None:
        self.scale, self.from_x, self.to_x = scale, from_x, to_x
        self.max_points = 2 * width
        self.pixels = width - 1
        # Divided first: the difference of two large numbers may be infinite.
        self.pixel_width = (to_x / self.pixels - from_x / self.pixels) or 1.0

    def count_pixels(self, first: Floats | float, last: Floats) -> Floats:
        """Return how many pixels there are between places."""
        pixels: Floats = last / self.pixel_width - first / self.pixel_width
        return pixels


class _Pieces(NamedTuple):
    """The records of a window, each in one pixel or so."""

    begins: Floats
    """Where they begin on the axis."""
    records: Floats
    """As buckets; see `SeriesView.take`."""
    points: Floats
    """How many each has."""
    last: Floats
    """Step and value of the last point of the window."""
    neighbours: Floats
    """Steps and values of the points next to the window, on both sides."""
    is_raw: bool
    """Whether all of them are points."""


def _collect_pieces(series: SeriesView, window: _Window, *, is_whole: bool = False) -> _Pieces:
    """Return the records of a window, from above: a bucket that is wider than a pixel, or only
    partly in the window, is replaced by its children. `is_whole` asks for points alone."""
    level = series.find_highest_level()
    numbers = series.list_rest(level)
    begins, kept, points = [], [], []
    while True:
        records = series.take(level, numbers)
        if level == 0:
            records = records[POINT_AS_BUCKET]
        first, last = window.scale.convert(records[0]), window.scale.convert(records[1])
        is_before, is_after = last < window.from_x, first > window.to_x
        is_inside = (first >= window.from_x) & (last <= window.to_x)
        nearest = _find_nearest(records, is_before, is_after)
        if level == 0:
            begins.append(first[is_inside])
            kept.append(records[:, is_inside])
            points.append(np.ones(int(is_inside.sum())))
            break
        is_open = ~(is_inside | is_before | is_after)
        is_open[nearest] = True
        if is_inside.any():
            if is_whole:
                is_open |= is_inside
            is_open |= is_inside & (window.count_pixels(first, last) > 1)
            is_open[_find_last(records[1], is_inside)] = True
        is_kept = is_inside & ~is_open
        begins.append(first[is_kept])
        kept.append(records[:, is_kept])
        points.append(np.full(int(is_kept.sum()), float(FACTOR**level)))
        level -= 1
        numbers = np.concatenate([list_children(numbers[is_open]), series.list_rest(level)])
    ends = [_find_last(records[1], is_inside)] if is_inside.any() else []
    return _Pieces(
        np.concatenate(begins),
        np.concatenate(kept, axis=1),
        np.concatenate(points),
        records[1:3, ends],
        records[1:3, nearest],
        all(not len(each) for each in points[:-1]),
    )


def _find_last(steps: Floats, is_meant: NDArray[np.bool_]) -> int:
    """Return the index of the highest step; of several the last."""
    meant = np.flatnonzero(is_meant)
    reverse = steps[meant][::-1]
    return int(meant[len(meant) - 1 - int(np.argmax(reverse))])


def _find_nearest(
    records: Floats, is_before: NDArray[np.bool_], is_after: NDArray[np.bool_]
) -> list[int]:
    """Return the indices of the records that are nearest to a window on both sides."""
    found = [_find_last(records[1], is_before)] if is_before.any() else []
    if is_after.any():
        after = np.flatnonzero(is_after)
        found.append(int(after[np.argmin(records[0][after])]))
    return found


# --- from records to points ---


def _draw_points(series: SeriesView, window: _Window) -> tuple[Floats, Floats, Floats, bool]:
    """Return x, y, the mean around each, and whether these are all points of the window."""
    pieces = _collect_pieces(series, window)
    is_exact = float(pieces.points.sum()) <= window.max_points
    if is_exact and not pieces.is_raw:
        pieces = _collect_pieces(series, window, is_whole=True)
    if is_exact:
        steps, values = pieces.records[0], pieces.records[2]
        means = values
    else:
        steps, values, means = _pick_extremes(pieces, window)
        last_step, last_value = pieces.last
        steps, values = np.append(steps, last_step), np.append(values, last_value)
        means = np.append(means, means[-1])
    near_steps, near_values = pieces.neighbours
    steps = np.concatenate([steps, near_steps])
    values = np.concatenate([values, near_values])
    means = np.concatenate([means, near_values])
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values, means = steps[order], values[order], means[order]
    if not is_exact:
        is_new = np.append(True, (np.diff(steps) != 0) | (np.diff(values) != 0))
        steps, values, means = steps[is_new], values[is_new], means[is_new]
    return window.scale.convert(steps), values, means, is_exact


def _pick_extremes(pieces: _Pieces, window: _Window) -> tuple[Floats, Floats, Floats]:
    """Return of every pixel its lowest and highest point in the order of their steps, and for both
    its mean."""
    pixels = np.floor(window.count_pixels(window.from_x, pieces.begins))
    pixels = np.clip(pixels, 0, window.pixels - 1).astype(np.int64)
    records, points = pieces.records, pieces.points
    if (np.diff(pixels) < 0).any():
        order = np.argsort(pixels, kind="stable")
        pixels, records, points = pixels[order], records[:, order], points[order]
    starts = np.flatnonzero(np.append(True, np.diff(pixels)))
    sizes = np.diff(np.append(starts, len(pixels)))
    groups = np.repeat(np.arange(len(starts)), sizes)
    lowest = _find_firsts(records[2], np.minimum.reduceat(records[2], starts), groups)
    highest = _find_firsts(records[4], np.maximum.reduceat(records[4], starts), groups)
    weights = points / np.add.reduceat(points, starts)[groups]
    means = np.add.reduceat(records[6] * weights, starts)
    low_steps, low_values = records[3, lowest], records[2, lowest]
    high_steps, high_values = records[5, highest], records[4, highest]
    is_falling = high_steps < low_steps
    steps = np.stack([low_steps, high_steps], axis=1)
    values = np.stack([low_values, high_values], axis=1)
    steps[is_falling] = steps[is_falling, ::-1]
    values[is_falling] = values[is_falling, ::-1]
    return steps.ravel(), values.ravel(), np.repeat(means, 2)


def _find_firsts(values: Floats, wanted: Floats, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each group the index of its first value that is the wanted one."""
    found = np.flatnonzero(values == wanted[groups])
    firsts: NDArray[np.int64] = found[np.append(True, np.diff(groups[found]) > 0)]
    return firsts


# --- for a page ---


def show_curves(request: Request) -> Response:
    """Answer with curves of several runs and metrics, as bytes: a header and arrays of float64."""
    axis = request.get("x", "step")
    if axis not in AXES:
        raise RequestError(f"x={axis[:80]!r} is no axis", suggest_nearest(axis, AXES))
    from_x, to_x = request.get_float("from"), request.get_float("to")
    if from_x is not None and to_x is not None and to_x < from_x:
        raise RequestError(f"from={from_x} is behind to={to_x}")
    ids, metrics = dict.fromkeys(request.get_all("run")), dict.fromkeys(request.get_all("metric"))
    if len(ids) * len(metrics) > _MAX_CURVES:
        raise RequestError(
            f"{len(ids) * len(metrics)} curves are too many for one request",
            f"ask for {_MAX_CURVES} at most",
        )
    return _encode_answer(_read_curves(request, list(ids), list(metrics)))


class _Answer(NamedTuple):
    curves: list[tuple[str, str, CurvePoints]]
    """With the id of the run and the metric."""
    faults: list[dict[str, str]]
    building: list[dict[str, Any]]


def _read_curves(request: Request, ids: list[str], metrics: list[str]) -> _Answer:
    """Return the curves of a request. Without a window it is the same one for all of them."""
    axis, width = request.get("x", "step"), request.get_int("width", 1500)
    from_x, to_x = request.get_float("from"), request.get_float("to")
    deadline = time.monotonic() + _READ_S
    answer = _Answer([], [], [])
    opened: list[tuple[str, str, _OpenCurve]] = []
    for run_id in ids:
        try:
            pyramid = pyramids.refresh(request.board.find_run(run_id), deadline)
        except (RequestError, OSError) as error:
            answer.faults.extend(
                {"run": run_id, "metric": metric, "error": _describe_error(error)}
                for metric in metrics
            )
            continue
        if pyramid.is_far_behind:
            answer.building.append({"run": run_id, "share": pyramid.share})
        scale = build_scale(pyramid, axis, from_x, to_x)
        opened += [(run_id, name, _OpenCurve.find(pyramid, name, scale)) for name in metrics]
    ranges = [curve.get_range() for _, _, curve in opened]
    first = min((each[0] for each in ranges), default=0.0) if from_x is None else from_x
    last = max((each[1] for each in ranges), default=0.0) if to_x is None else to_x
    for run_id, metric, curve in opened:
        try:
            points = curve.draw(first, last, min(max(width, 2), _MAX_WIDTH))
        except DamagedCurvesError:
            curve.pyramid.discard_damaged_file()
            answer.building.append({"run": run_id, "share": 0.0})
            continue
        answer.curves.append((run_id, metric, points))
    return answer


def _describe_error(error: RequestError | OSError) -> str:
    return error.what if isinstance(error, RequestError) else format_os_error_reason(error)


def _encode_answer(answer: _Answer) -> Response:
    arrays: list[Floats] = []
    curves = []
    offset = 0
    for run_id, metric, points in answer.curves:
        count = len(points.x)
        curves.append(
            {
                **{"run": run_id, "metric": metric, "x": points.axis},
                **{"n": count, "offset": offset, "exact": points.is_exact},
                **{"count": points.count, "not_finite": points.not_finite},
                **{"first_x": points.first_x, "last_x": points.last_x, "lines": points.lines},
            }
        )
        arrays += [points.x, points.y, points.mean]
        offset += 3 * count
    header = {"curves": curves, "faults": answer.faults, "building": answer.building}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    data = np.concatenate(arrays).astype("<f8", copy=False).tobytes() if arrays else b""
    return Response(len(text).to_bytes(4, "little") + text + data, BYTES_TYPE)


ROUTES: list[Route] = [("GET", "/api/curves", show_curves)]
