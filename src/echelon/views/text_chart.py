"""Curves in text: braille dots with axes, or plain ASCII where there is no braille.

`draw_panel` draws one curve, `draw_chart` several in one frame, for which colours are up to the
caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from echelon.tracking.summary import needs_log_scale

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a character, row by row."""
_LABEL_WIDTH = 8
"""Characters of a value at the left."""


@dataclass(frozen=True)
class TextPanel:
    """One curve and its labels."""

    title: str
    xs: Sequence[float]
    ys: Sequence[float]
    unit: str
    """What the numbers below are."""


@dataclass(frozen=True)
class Glyphs:
    """How many dots a character has, and how they are written."""

    dots_wide: int
    dots_high: int
    side: str
    corner: str
    floor: str

    def render_cell(self, dots: frozenset[tuple[int, int]]) -> str:
        """Return the character with these dots."""
        if self.dots_high == 4:
            return chr(0x2800 + sum(_BRAILLE[y][x] for x, y in dots)) if dots else " "
        return {0: " ", 1: "'", 2: ".", 3: ":"}[sum(1 << y for _, y in dots)]


@dataclass(frozen=True)
class ChartCurve:
    """One of several curves, as points in the order of the axis, which are joined by lines."""

    xs: Sequence[float]
    ys: Sequence[float]
    letter: str = ""
    """What it is drawn with instead of dots, where colours cannot tell curves apart."""


@dataclass(frozen=True)
class ChartWindow:
    """The part of the plane that is drawn. A logarithmic axis begins above 0."""

    first_x: float
    last_x: float
    low: float
    high: float
    is_log: bool = False
    """Whether the axis of values is logarithmic."""
    unit: str = "step"
    """What the numbers below are."""


ChartLine = list[tuple[str, int | None]]
"""Parts of a line: a text and the number of the curve that it belongs to, or None for an axis."""


BRAILLE = Glyphs(2, 4, "┤", "└", "─")
ASCII = Glyphs(1, 2, "|", "+", "-")


def draw_panel(panel: TextPanel, width: int, height: int, glyphs: Glyphs) -> list[str]:
    """Return lines of exactly this width: a title, ``height`` rows, the axis and its numbers."""
    low, high = min(panel.ys), max(panel.ys)
    is_log = needs_log_scale(low, high)
    columns = width - _LABEL_WIDTH - 1
    grid = _group_dots_by_cell(panel, columns, height, glyphs, is_log)
    labels = _format_labels(low, high, height, is_log)
    title = panel.title + (" (log)" if is_log else "")
    lines = [" " * (_LABEL_WIDTH + 1) + title[:columns].ljust(columns)]
    for row in range(height):
        cells = [frozenset(grid.get((column, row), ())) for column in range(columns)]
        edge = glyphs.side if row in labels else "│" if glyphs.dots_high == 4 else "|"
        lines.append(
            f"{labels.get(row, ''):>{_LABEL_WIDTH}}{edge}" + "".join(map(glyphs.render_cell, cells))
        )
    lines.append(" " * _LABEL_WIDTH + glyphs.corner + glyphs.floor * columns)
    numbers = _format_x_axis(panel.xs[0], panel.xs[-1], panel.unit, columns)
    return [*lines, " " * (_LABEL_WIDTH + 1) + numbers]


def join_side_by_side(panels: Sequence[Sequence[str]], gap: int = 2) -> list[str]:
    """Return panels of one height next to each other."""
    return [(" " * gap).join(parts).rstrip() for parts in zip(*panels, strict=True)]


def draw_chart(
    curves: Sequence[ChartCurve], window: ChartWindow, width: int, height: int, glyphs: Glyphs
) -> list[ChartLine]:
    """Return lines of exactly this width: ``height`` rows, the axis and its numbers. Where curves
    cross, the first of them is on top. Every point inside of the window is drawn."""
    columns = max(1, width - _LABEL_WIDTH - 1)
    owners: dict[tuple[int, int], int] = {}
    dots: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for number in reversed(range(len(curves))):
        for cell, own in _group_points_by_cell(
            curves[number], window, columns, height, glyphs
        ).items():
            owners[cell] = number
            dots.setdefault(cell, set()).update(own)
    labels = _format_labels(window.low, window.high, height, window.is_log)
    lines: list[ChartLine] = []
    for row in range(height):
        edge = glyphs.side if row in labels else "│" if glyphs.dots_high == 4 else "|"
        line: ChartLine = [(f"{labels.get(row, ''):>{_LABEL_WIDTH}}{edge}", None)]
        for column in range(columns):
            owner = owners.get((column, row))
            letter = "" if owner is None else curves[owner].letter
            sign = letter or glyphs.render_cell(frozenset(dots.get((column, row), ())))
            if line[-1][1] == owner and len(line) > 1:
                line[-1] = (line[-1][0] + sign, owner)
            else:
                line.append((sign, owner))
        lines.append(line)
    lines.append([(" " * _LABEL_WIDTH + glyphs.corner + glyphs.floor * columns, None)])
    numbers = _format_x_axis(window.first_x, window.last_x, window.unit, columns)
    return [*lines, [(" " * (_LABEL_WIDTH + 1) + numbers, None)]]


def _group_points_by_cell(
    curve: ChartCurve, window: ChartWindow, columns: int, height: int, glyphs: Glyphs
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return the dots of a curve in each character cell."""
    width, dots_high = columns * glyphs.dots_wide, height * glyphs.dots_high
    convert = _make_value_scale(window.is_log)
    low, high = convert(window.low), convert(window.high)
    first, reach = window.first_x, (window.last_x - window.first_x) or 1.0
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    before: tuple[int, int] | None = None
    for x, y in _clip_points(curve, window, convert):
        share = (min(max(y, low), high) - low) / ((high - low) or 1.0)
        row = round((1 - share) * (dots_high - 1)) if high > low else dots_high // 2
        here = (round((x - first) / reach * (width - 1)), row)
        for dot_x, dot_y in _rasterize_line(before or here, here):
            cell = found.setdefault((dot_x // glyphs.dots_wide, dot_y // glyphs.dots_high), set())
            cell.add((dot_x % glyphs.dots_wide, dot_y % glyphs.dots_high))
        before = here
    return found


def _clip_points(
    curve: ChartCurve, window: ChartWindow, convert: Callable[[float], float]
) -> Iterator[tuple[float, float]]:
    """Yield the points of a curve between the ends of the window, values on their scale, and where
    its line crosses these ends. A logarithmic axis leaves out what is not above 0."""
    before: tuple[float, float] | None = None
    for x, value in zip(curve.xs, curve.ys, strict=True):
        if window.is_log and value <= 0:
            continue
        here = (x, convert(value))
        for edge in (window.first_x, window.last_x):
            if before is not None and before[0] < edge < x:
                share = (edge - before[0]) / (x - before[0])
                yield edge, before[1] + (here[1] - before[1]) * share
        if window.first_x <= x <= window.last_x:
            yield here
        before = here


def _make_value_scale(is_log: bool) -> Callable[[float], float]:
    # A range of 1e308 is finite as a quarter.
    return math.log if is_log else lambda value: value / 4


def _format_labels(low: float, high: float, height: int, is_log: bool) -> dict[int, str]:
    if high == low:
        return {height // 2: _format_number(low)}
    middle = math.sqrt(low) * math.sqrt(high) if is_log else low / 2 + high / 2
    return {
        0: _format_number(high),
        height // 2: _format_number(middle),
        height - 1: _format_number(low),
    }


def _format_number(value: float) -> str:
    texts = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return next(text for text in texts if len(text) <= _LABEL_WIDTH)


def _format_x_axis(first_x: float, last_x: float, unit: str, columns: int) -> str:
    first, last = f"{first_x:g}", f"{unit} {last_x:.10g}"
    return first + last.rjust(columns - len(first))


def _group_dots_by_cell(
    panel: TextPanel, columns: int, height: int, glyphs: Glyphs, is_log: bool
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return the dots of the curve in each character cell."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for x, y in _iterate_dots(panel, columns * glyphs.dots_wide, height * glyphs.dots_high, is_log):
        cell = found.setdefault((x // glyphs.dots_wide, y // glyphs.dots_high), set())
        cell.add((x % glyphs.dots_wide, y % glyphs.dots_high))
    return found


def _iterate_dots(
    panel: TextPanel, width: int, height: int, is_log: bool
) -> Iterator[tuple[int, int]]:
    """Yield the dots of a curve: one value for each column that has any, their mean, joined by
    lines."""
    ys = list(map(_make_value_scale(is_log), panel.ys))
    first, reach = panel.xs[0], (panel.xs[-1] - panel.xs[0]) or 1.0
    gathered: dict[int, list[float]] = {}
    for x, y in zip(panel.xs, ys, strict=True):
        gathered.setdefault(round((x - first) / reach * (width - 1)), []).append(y)
    low, span = min(ys), (max(ys) - min(ys)) or 0.0
    before: tuple[int, int] | None = None
    for x, values in sorted(gathered.items()):
        mean = sum(v / len(values) for v in values)
        y = round((1 - (mean - low) / span) * (height - 1)) if span else height // 2
        yield from _rasterize_line(before or (x, y), (x, y))
        before = (x, y)


def _rasterize_line(a: tuple[int, int], b: tuple[int, int]) -> Iterator[tuple[int, int]]:
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for i in range(steps + 1):
        yield (
            round(a[0] + (b[0] - a[0]) * i / steps),
            round(a[1] + (b[1] - a[1]) * i / steps),
        )
