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

from echelon.board.curves.curve_builds import PyramidCache
from echelon.board.curves.curve_file import DamagedCurvesError
from echelon.board.curves.curve_pyramid import LEVEL_SIZES, CurvePyramid, SeriesView
from echelon.board.curves.curve_scale import AXES, AxisScale, build_scale
from echelon.board.curves.line_columns import NUMBER
from echelon.board.request import BYTES_TYPE, Request, RequestError, Response, Route
from echelon.errors import suggest_nearest
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason

Floats = NDArray[np.float64]

_READ_S = 0.25
"""For new lines, in one request. What is not read by then comes with the next one."""
_MAX_FACTOR = 256
"""So many children of a bucket are looked at, to find one of them."""
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
    return read_curve(pyramid, metric, x, from_x, to_x, width)


def read_curve(
    pyramid: CurvePyramid,
    metric: str,
    x: str,
    from_x: float | None,
    to_x: float | None,
    width: int,
) -> CurvePoints:
    """Return the points of a metric as far as a pyramid has them; see `query_curve`."""
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
    """Points and buckets of a window, each in one pixel or so, as columns."""

    begins: Floats
    """Where they begin on the axis."""
    low_values: Floats
    low_steps: Floats
    high_values: Floats
    high_steps: Floats
    means: Floats
    points: Floats
    """How many each has."""


_Point = list[tuple[float, float]]
"""Step and value of a point; empty for none."""


class _Found(NamedTuple):
    """What is to be drawn of a window, before pixels are filled."""

    pieces: _Pieces
    is_raw: bool
    """Whether all pieces are points."""
    last: _Point
    """The last point of the window."""
    before: _Point
    after: _Point
    """The points next to the window."""


def _collect_pieces(series: SeriesView, window: _Window, *, is_whole: bool = False) -> _Found:
    """Return the pieces of a window, from above: a bucket that is wider than a pixel, or only
    partly in the window, is replaced by its children. `is_whole` asks for points alone."""
    convert = window.scale.convert
    level = series.find_highest_level()
    numbers = series.list_all(level)
    found: list[_Pieces] = []
    while level:
        records = series.take(level, numbers)
        low_steps, high_steps = records[0], records[1]
        first, last = convert(low_steps), convert(high_steps)
        is_inside = (first >= window.from_x) & (last <= window.to_x)
        widths = window.count_pixels(first, last)
        is_open = is_inside & (is_whole | (widths > 1))
        lower = 0 if is_whole else _choose_lower_level(level, widths[is_open])
        # Where the last point is, and the points next to the window.
        ends = [_find_last(high_steps, is_inside)]
        if not is_inside.all():
            is_before, is_after = last < window.from_x, first > window.to_x
            is_open |= ~(is_inside | is_before | is_after)
            ends += [_find_last(high_steps, is_before), _find_first(low_steps, is_after)]
        is_open[[end for end in ends if end is not None]] = True
        kept = (is_inside & ~is_open).nonzero()[0]
        if len(kept):
            _, _, low, low_step, high, high_step, mean = records[:, kept]
            points = np.full(len(kept), float(LEVEL_SIZES[level]))
            found.append(_Pieces(first[kept], low, low_step, high, high_step, mean, points))
        numbers = series.list_parts(level, numbers[is_open], lower)
        level = lower
    is_raw = not found
    points, before, after = _split_points(series.take(0, numbers), window, series.is_ascending)
    steps, values = points[0], points[1]
    found.append(_Pieces(convert(steps), values, steps, values, steps, values, np.ones(len(steps))))
    pieces = found[0] if is_raw else _Pieces(*map(np.concatenate, zip(*found, strict=True)))
    last_one = _find_last(steps, np.ones(len(steps), np.bool_))
    return _Found(pieces, is_raw, _pick_point(points, last_one), before, after)


def _choose_lower_level(level: int, widths: Floats) -> int:
    """Return at which level buckets that are so many pixels wide are looked at: where the narrowest
    of them is about a pixel wide. Without any it is for the sake of some points alone."""
    factor = 4 * float(widths.min()) if len(widths) else _MAX_FACTOR
    lower = level - 1
    while lower and LEVEL_SIZES[level] <= factor * LEVEL_SIZES[lower - 1]:
        lower -= 1
    return lower


def _split_points(
    points: Floats, window: _Window, is_ascending: bool
) -> tuple[Floats, _Point, _Point]:
    """Return the points in a window, and those that are next to it on either side."""
    steps = points[0]
    xs = window.scale.convert(steps)
    if is_ascending:
        start = int(np.searchsorted(xs, window.from_x))
        stop = int(np.searchsorted(xs, window.to_x, side="right"))
        before = _pick_point(points, start - 1 if start else None)
        after = _pick_point(points, stop if stop < len(steps) else None)
        return points[:, start:stop], before, after
    is_before, is_after = xs < window.from_x, xs > window.to_x
    before = _pick_point(points, _find_last(steps, is_before))
    after = _pick_point(points, _find_first(steps, is_after))
    return points[:, ~(is_before | is_after)], before, after


def _pick_point(points: Floats, number: int | None) -> _Point:
    return [] if number is None else [(float(points[0, number]), float(points[1, number]))]


def _find_last(steps: Floats, is_meant: NDArray[np.bool_]) -> int | None:
    """Return the index of the highest step of those that are meant, of several the last."""
    meant = is_meant.nonzero()[0]
    if not len(meant):
        return None
    own = steps[meant]
    if own[-1] >= own.max():  # as in every file but those with steps that go back
        return int(meant[-1])
    return int(meant[len(meant) - 1 - int(own[::-1].argmax())])


def _find_first(steps: Floats, is_meant: NDArray[np.bool_]) -> int | None:
    """Return the index of the lowest step of those that are meant, of several the first."""
    meant = is_meant.nonzero()[0]
    return int(meant[steps[meant].argmin()]) if len(meant) else None


# --- from pieces to points ---


def _draw_points(series: SeriesView, window: _Window) -> tuple[Floats, Floats, Floats, bool]:
    """Return x, y, the mean around each, and whether these are all points of the window."""
    found = _collect_pieces(series, window)
    is_exact = float(found.pieces.points.sum()) <= window.max_points
    if is_exact and not found.is_raw:
        found = _collect_pieces(series, window, is_whole=True)
    if is_exact:
        steps, values = found.pieces.low_steps, found.pieces.low_values
        means, ends = values, found.after
    else:
        steps, values, means = _pick_extremes(found.pieces, window)
        ends = found.last + found.after
    near = np.array(found.before + ends).reshape(-1, 2)
    split = len(found.before)
    near_means = near[:, 1].copy()
    if not is_exact:
        near_means[split] = means[-1]
    steps = np.concatenate([near[:split, 0], steps, near[split:, 0]])
    values = np.concatenate([near[:split, 1], values, near[split:, 1]])
    means = np.concatenate([near_means[:split], means, near_means[split:]])
    if (steps[1:] < steps[:-1]).any():
        order = np.argsort(steps, kind="stable")
        steps, values, means = steps[order], values[order], means[order]
    if not is_exact:  # the lowest and the highest point of a pixel may be one, or be the last
        is_new = (steps[1:] != steps[:-1]) | (values[1:] != values[:-1])
        is_new = np.concatenate([[True], is_new])
        steps, values, means = steps[is_new], values[is_new], means[is_new]
    return window.scale.convert(steps), values, means, is_exact


def _pick_extremes(pieces: _Pieces, window: _Window) -> tuple[Floats, Floats, Floats]:
    """Return of every pixel its lowest and highest point in the order of their steps, and for both
    its mean."""
    numbers = window.count_pixels(window.from_x, pieces.begins)
    # Of 16 bits, which are sorted faster.
    pixels = np.clip(numbers, 0, window.pixels - 1).astype(np.int16)
    if (pixels[1:] < pixels[:-1]).any():
        order = np.argsort(pixels, kind="stable")
        pixels, pieces = pixels[order], _Pieces(*(column[order] for column in pieces))
    starts = np.concatenate([[0], (pixels[1:] != pixels[:-1]).nonzero()[0] + 1])
    sizes = np.concatenate([starts[1:], [len(pixels)]]) - starts
    groups = np.repeat(np.arange(len(starts)), sizes)
    lowest = _find_extremes(pieces.low_values, np.minimum, starts, groups)
    highest = _find_extremes(pieces.high_values, np.maximum, starts, groups)
    weights = pieces.points / np.add.reduceat(pieces.points, starts)[groups]
    means = np.add.reduceat(pieces.means * weights, starts)
    low_steps, high_steps = pieces.low_steps[lowest], pieces.high_steps[highest]
    low_values, high_values = pieces.low_values[lowest], pieces.high_values[highest]
    is_rising = low_steps <= high_steps
    steps, values = np.empty((2, len(starts), 2))
    np.minimum(low_steps, high_steps, out=steps[:, 0])
    np.maximum(low_steps, high_steps, out=steps[:, 1])
    values[:, 0] = np.where(is_rising, low_values, high_values)
    values[:, 1] = np.where(is_rising, high_values, low_values)
    return steps.ravel(), values.ravel(), np.repeat(means, 2)


def _find_extremes(
    values: Floats, function: np.ufunc, starts: NDArray[np.int64], groups: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each group the index of its first value that is its lowest, or highest."""
    found: NDArray[np.int64] = (values == function.reduceat(values, starts)[groups]).nonzero()[0]
    if len(found) == len(starts):
        return found
    own = groups[found]
    is_first = np.concatenate([[True], own[1:] != own[:-1]])
    firsts: NDArray[np.int64] = found[is_first]
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
    arrays: list[bytes | memoryview] = []
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
        arrays += [each.data for each in (points.x, points.y, points.mean)]
        offset += 3 * count
    header = {"curves": curves, "faults": answer.faults, "building": answer.building}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    body = b"".join([len(text).to_bytes(4, "little"), text, *arrays])
    return Response(body, BYTES_TYPE)


ROUTES: list[Route] = [("GET", "/api/curves", show_curves)]
