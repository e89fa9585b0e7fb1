"""A curve in text: braille dots with axes, or plain ASCII where there is no braille."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    return [*lines, " " * (_LABEL_WIDTH + 1) + _format_x_axis(panel, columns)]


def join_side_by_side(panels: Sequence[Sequence[str]], gap: int = 2) -> list[str]:
    """Return panels of one height next to each other."""
    return [(" " * gap).join(parts).rstrip() for parts in zip(*panels, strict=True)]


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


def _format_x_axis(panel: TextPanel, columns: int) -> str:
    first, last = f"{panel.xs[0]:g}", f"{panel.unit} {panel.xs[-1]:.10g}"
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
    ys = [math.log(y) if is_log else y / 4 for y in panel.ys]  # a range of 1e308 is finite then
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
