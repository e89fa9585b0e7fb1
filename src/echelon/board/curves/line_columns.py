"""Lines of metrics.jsonl as columns: a block of lines becomes arrays, a name each.

What counts as a number and what as a line is as in `runs.metrics_file`. Parsing a block at once
takes half the time of parsing its lines one by one, so this is done as long as the lines are sound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.runs.curves import estimate_begin
from echelon.runs.metrics_file import MetricsLine, is_number
from echelon.runs.metrics_summary import NOT_METRICS
from echelon.tracking.media_records import is_histogram

NUMBER, AXIS = "number", "axis"
MEDIA_KINDS = ("image", "histogram", "text")
AXIS_NAMES = ("samples", "time")
_PLACE_NAMES = ("step", "epoch", "samples", "samples_per_s", "time")
_MAX_LAYOUTS = 64
"""Different sets of names in a block. With more, values are collected one by one."""
_SMALL_BATCH = 8
"""Lines. If they cannot be parsed together, they are parsed one by one."""

SeriesKey = tuple[str, str]
"""Kind and name. `number`: the values of a metric. `image`, `histogram`, `text`: where in the file
the lines are that have one. `axis`: samples and time, by which steps are placed on other axes."""
Floats = NDArray[np.float64]
Column = tuple[NDArray[np.int64], Sequence[Any]]
"""The rows that have a name, and its values there."""


@dataclass
class BlockColumns:
    """What a block of lines holds."""

    lines: int = 0
    """Those that are JSON objects with a step."""
    series: dict[SeriesKey, tuple[Floats, Floats]] = field(default_factory=dict)
    """Steps and values, in the order of the lines. The value of a medium is the position of its
    line in the file."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Values of a metric that are NaN or infinite, and are left out."""
    steps_per_epoch: float | None = None
    """The largest that a line of training shows."""
    begun: float | None = None
    """When training began, by the first line of training."""
    first_time: float | None = None


def read_block(block: bytes, offset: int) -> BlockColumns:
    """Return the columns of whole lines that begin at a position of the file."""
    rows, starts = _parse_rows(block)
    columns = {name: _join_pieces(pieces) for name, pieces in _collect_columns(rows).items()}
    found = BlockColumns()
    steps = _fill_rows(columns.get("step"), len(rows))
    has_step = np.isfinite(steps)
    found.lines = int(has_step.sum())
    if not found.lines:
        return found
    if found.lines < len(rows):
        columns = {name: _keep_rows(column, has_step) for name, column in columns.items()}
    for name, (numbers, values) in columns.items():
        if name not in NOT_METRICS and len(numbers):
            _add_metric(found, name, steps, numbers, values, starts + offset)
    _add_places(found, columns, steps)
    return found


# --- parsing ---


def _parse_rows(block: bytes) -> tuple[list[MetricsLine], NDArray[np.int64]]:
    """Return the JSON objects of a block and where in it their lines begin."""
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    if not len(ends):
        return [], ends
    starts = np.concatenate([[0], ends[:-1] + 1])
    # An object that is cut at a comma would be joined with the next line otherwise.
    is_whole = (text[starts] == ord("{")) & (text[np.maximum(ends - 1, 0)] == ord("}"))
    rows: list[MetricsLine | None] = []
    _parse_lines(block, starts, ends, is_whole, rows)
    found = [i for i, row in enumerate(rows) if row is not None]
    if len(found) < len(rows):
        starts = starts[found]
    return [row for row in rows if row is not None], starts


def _parse_lines(
    block: bytes,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    is_whole: NDArray[np.bool_],
    rows: list[MetricsLine | None],
) -> None:
    """Add the object of each line, or None. Where they cannot be parsed together, halves are."""
    if bool(is_whole.all()):
        lines = block[starts[0] : ends[-1]].replace(b"\n", b",\n")
        try:
            found = json.loads(f"[{lines.decode()}]")
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(starts):
            rows += found
            return
    if len(starts) <= _SMALL_BATCH:
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            try:
                row = json.loads(block[start:end])
            except (ValueError, RecursionError):
                row = None
            rows.append(row if isinstance(row, dict) else None)
        return
    middle = len(starts) // 2
    for half in (slice(None, middle), slice(middle, None)):
        _parse_lines(block, starts[half], ends[half], is_whole[half], rows)


def _collect_columns(rows: Sequence[MetricsLine]) -> dict[str, list[Column]]:
    """Return the columns of all names, each in pieces with their rows."""
    layouts: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        layouts.setdefault(tuple(row), []).append(number)
    columns: dict[str, list[Column]] = {}
    if len(layouts) > _MAX_LAYOUTS:
        for name, (numbers, values) in _collect_values(rows).items():
            columns[name] = [(np.array(numbers), values)]
        return columns
    for names, numbers in layouts.items():
        picked = rows if len(layouts) == 1 else [rows[number] for number in numbers]
        where = np.array(numbers)
        for name, column in zip(names, zip(*map(dict.values, picked), strict=True), strict=True):
            columns.setdefault(name, []).append((where, column))
    return columns


def _collect_values(rows: Sequence[MetricsLine]) -> dict[str, tuple[list[int], list[Any]]]:
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = ([], [])
            column[0].append(number)
            column[1].append(value)
    return columns


def _join_pieces(pieces: list[Column]) -> Column:
    """Return one column, in the order of its rows."""
    if len(pieces) == 1:
        return pieces[0]
    numbers = np.concatenate([where for where, _ in pieces])
    values = [value for _, column in pieces for value in column]
    order = np.argsort(numbers, kind="stable")
    return numbers[order], [values[i] for i in order.tolist()]


def _keep_rows(column: Column, is_kept: NDArray[np.bool_]) -> Column:
    numbers, values = column
    picked = np.flatnonzero(is_kept[numbers])
    return numbers[picked], [values[i] for i in picked.tolist()]


# --- values ---


def _convert_values(values: Sequence[Any]) -> tuple[Floats, int]:
    """Return values as floats, NaN for what is not a number that can be drawn, and how many are
    floats that are not finite."""
    floats: Floats | None = None
    if {*map(type, values)} <= {float, int}:
        try:
            floats = np.array(values, np.float64)
        except OverflowError:  # an integer beyond the range of a float
            floats = None
    if floats is None:
        floats = np.array([v if is_number(v) else np.nan for v in values], np.float64)
        not_finite = sum(isinstance(v, float) and not is_number(v) for v in values)
        return floats, not_finite
    is_finite = np.isfinite(floats)
    if is_finite.all():
        return floats, 0
    floats[~is_finite] = np.nan
    return floats, int((~is_finite).sum())


def _fill_rows(column: Column | None, count: int) -> Floats:
    """Return a value for every row, NaN where there is none."""
    filled = np.full(count, np.nan)
    if column is not None:
        filled[column[0]] = _convert_values(column[1])[0]
    return filled


def _add_metric(
    found: BlockColumns,
    name: str,
    steps: Floats,
    numbers: NDArray[np.int64],
    values: Sequence[Any],
    positions: NDArray[np.int64],
) -> None:
    floats, not_finite = _convert_values(values)
    if not_finite:
        found.not_finite[name] = not_finite
    is_finite = np.isfinite(floats)
    if is_finite.all():
        found.series[NUMBER, name] = steps[numbers], floats
        return
    if is_finite.any():
        found.series[NUMBER, name] = steps[numbers[is_finite]], floats[is_finite]
    media: dict[str, list[int]] = {}
    for number, value in zip(numbers.tolist(), values, strict=True):
        if (kind := get_media_kind(value)) is not None:
            media.setdefault(kind, []).append(number)
    for kind, rows in media.items():
        found.series[kind, name] = steps[rows], positions[rows].astype(np.float64)


def get_media_kind(value: Any) -> str | None:
    """Return what a value of a line is: an image, a histogram, a text or none of them."""
    if isinstance(value, str):
        return "text"
    if is_histogram(value):
        return "histogram"
    return "image" if isinstance(value, dict) and isinstance(value.get("image"), str) else None


def _add_places(found: BlockColumns, columns: Mapping[str, Column], steps: Floats) -> None:
    """Add where steps are on the other axes."""
    places = {name: _fill_rows(columns.get(name), len(steps)) for name in _PLACE_NAMES}
    has_step = np.isfinite(steps)
    for name in AXIS_NAMES:
        is_said = has_step & np.isfinite(places[name])
        if is_said.any():
            found.series[AXIS, name] = steps[is_said], places[name][is_said]
    times = found.series.get((AXIS, "time"))
    found.first_time = None if times is None else float(times[1][0])
    is_training = np.logical_and.reduce(
        [np.isfinite(places[name]) for name in _PLACE_NAMES if name != "epoch"] + [has_step]
    )
    if not is_training.any():
        return
    first = int(np.argmax(is_training))
    found.begun = estimate_begin({name: float(places[name][first]) for name in _PLACE_NAMES})
    epochs = places["epoch"]
    is_named = is_training & np.isfinite(epochs) & (epochs != 0)
    if is_named.any():
        with np.errstate(over="ignore"):
            found.steps_per_epoch = float((steps[is_named] / epochs[is_named]).max())
