"""A curve in letters: braille dots with axes, or plain ASCII where there is no braille."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.track.summary import falls_far

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a letter, row by row."""
_LABEL = 8
"""Letters of a value at the left."""


@dataclass(frozen=True)
class Panel:
    title: str
    xs: Sequence[float]
    ys: Sequence[float]
    unit: str
    """What the numbers below are."""


@dataclass(frozen=True)
class Letters:
    """How many dots a letter has, and how they are written."""

    wide: int
    high: int
    side: str
    corner: str
    floor: str

    def letter(self, dots: frozenset[tuple[int, int]]) -> str:
        if self.high == 4:
            return chr(0x2800 + sum(_BRAILLE[y][x] for x, y in dots)) if dots else " "
        return {0: " ", 1: "'", 2: ".", 3: ":"}[sum(1 << y for _, y in dots)]


BRAILLE = Letters(2, 4, "┤", "└", "─")
ASCII = Letters(1, 2, "|", "+", "-")


def drawn(panel: Panel, width: int, height: int, letters: Letters) -> list[str]:
    """Lines of exactly this width: a title, `height` rows, the axis and its numbers."""
    low, high = min(panel.ys), max(panel.ys)
    log = falls_far(low, high)
    columns = width - _LABEL - 1
    grid = _grid(panel, columns, height, letters, log)
    labels = _labels(low, high, height, log)
    title = panel.title + (" (log)" if log else "")
    lines = [" " * (_LABEL + 1) + title[:columns].ljust(columns)]
    for row in range(height):
        cells = [frozenset(grid.get((column, row), ())) for column in range(columns)]
        edge = letters.side if row in labels else "│" if letters.high == 4 else "|"
        lines.append(f"{labels.get(row, ''):>{_LABEL}}{edge}" + "".join(map(letters.letter, cells)))
    lines.append(" " * _LABEL + letters.corner + letters.floor * columns)
    return [*lines, " " * (_LABEL + 1) + _feet(panel, columns)]


def beside(panels: Sequence[Sequence[str]], gap: int = 2) -> list[str]:
    """Panels of one height next to each other."""
    return [(" " * gap).join(parts).rstrip() for parts in zip(*panels, strict=True)]


def _labels(low: float, high: float, height: int, log: bool) -> dict[int, str]:
    if high == low:
        return {height // 2: _number(low)}
    middle = math.sqrt(low) * math.sqrt(high) if log else low / 2 + high / 2
    return {0: _number(high), height // 2: _number(middle), height - 1: _number(low)}


def _number(value: float) -> str:
    texts = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return next(text for text in texts if len(text) <= _LABEL)


def _feet(panel: Panel, columns: int) -> str:
    first, last = f"{panel.xs[0]:g}", f"{panel.unit} {panel.xs[-1]:.10g}"
    return first + last.rjust(columns - len(first))


def _grid(
    panel: Panel, columns: int, height: int, letters: Letters, log: bool
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """The dots of each letter."""
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for x, y in _dots(panel, columns * letters.wide, height * letters.high, log):
        cell = found.setdefault((x // letters.wide, y // letters.high), set())
        cell.add((x % letters.wide, y % letters.high))
    return found


def _dots(panel: Panel, wide: int, high: int, log: bool) -> Iterator[tuple[int, int]]:
    """One value for each column that has any, their mean, joined by lines."""
    ys = [math.log(y) if log else y / 4 for y in panel.ys]  # a range of 1e308 is finite then
    first, reach = panel.xs[0], (panel.xs[-1] - panel.xs[0]) or 1.0
    gathered: dict[int, list[float]] = {}
    for x, y in zip(panel.xs, ys, strict=True):
        gathered.setdefault(round((x - first) / reach * (wide - 1)), []).append(y)
    low, span = min(ys), (max(ys) - min(ys)) or 0.0
    before: tuple[int, int] | None = None
    for x, values in sorted(gathered.items()):
        mean = sum(v / len(values) for v in values)
        y = round((1 - (mean - low) / span) * (high - 1)) if span else high // 2
        yield from _line(before or (x, y), (x, y))
        before = (x, y)


def _line(a: tuple[int, int], b: tuple[int, int]) -> Iterator[tuple[int, int]]:
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for i in range(steps + 1):
        yield (
            round(a[0] + (b[0] - a[0]) * i / steps),
            round(a[1] + (b[1] - a[1]) * i / steps),
        )
