"""What a picture of a sweep shows, before it is drawn: the same for a page and for matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from echelon.errors import EchelonError, Exit, Fault
from echelon.sweep import given
from echelon.sweep.book import Result
from echelon.sweep.report import Report

_LINES = 400
"""Trials drawn through the parameters, the best of them: more are only a stain."""
_FEW = 5
"""So many different values are all named on their axis."""
_FAR = 50.0
"""A range over which a parameter is better seen by its logarithm."""


class Point(NamedTuple):
    number: int
    value: float
    state: str
    label: str


class Axis(NamedTuple):
    name: str
    ticks: list[tuple[float, str]]
    """Places between 0 and 1, and what stands there."""


class Line(NamedTuple):
    number: int
    places: list[float | None]
    """On every axis, between 0 and 1."""
    goodness: float
    """1 for the best trial, 0 for the worst."""
    label: str


class Drawing(NamedTuple):
    title: str
    metric: str
    log: bool
    points: list[Point]
    best: list[tuple[int, float]]
    """The best so far, where it changes."""
    axes: list[Axis]
    lines: list[Line]
    importance: list[tuple[str, float]]


def drawing(told: Report) -> Drawing:
    known = [r for r in told.results if r.value is not None and math.isfinite(r.value)]
    known = [r for r in known if r.state in ("finished", "pruned")]
    if not known:
        raise EchelonError(
            Fault(f"the sweep {told.sweep.name} has no result to draw", "wait for the first one"),
            exit=Exit.NOT_FOUND,
        )
    names = list(dict.fromkeys(name for result in known for name in result.values))
    rows = [{**r.values, told.metric.name: r.value} for r in known]
    axes = {n: _Scale([row[n] for row in rows if n in row]) for n in [*names, told.metric.name]}
    ranked = [r for r in told.ranked() if r in known]
    last = max(1, len(ranked) - 1)
    lines = [
        Line(
            r.number,
            _places({**r.values, told.metric.name: r.value}, axes),
            1 - place / last,
            _label(r, told.metric.name),
        )
        for place, r in enumerate(ranked[:_LINES])
    ]
    values = [r.value for r in known if r.value is not None]
    return Drawing(
        f"{told.sweep.name}: {told.done} trials",
        told.metric.name,
        min(values) > 0 and max(values) > _FAR * min(values),
        [Point(r.number, r.value or 0.0, r.state, _label(r, told.metric.name)) for r in known],
        _records(known, told.metric.sign),
        [Axis(name, scale.ticks()) for name, scale in axes.items()],
        lines,
        list(told.importance.items()),
    )


def _label(result: Result, metric: str) -> str:
    value = f"{metric} {result.value:.5g}" if result.value is not None else ""
    return f"trial {result.name} {result.state}, {value}: {given.listed(result.values)}"


def _records(known: Sequence[Result], sign: float) -> list[tuple[int, float]]:
    best: list[tuple[int, float]] = []
    for result in known:
        value = result.value
        if value is None or result.state != "finished":
            continue
        if not best or sign * value < sign * best[-1][1]:
            best.append((result.number, value))
    return best


def _places(row: Mapping[str, Any], axes: Mapping[str, _Scale]) -> list[float | None]:
    return [scale.place(row[name]) if name in row else None for name, scale in axes.items()]


class _Scale:
    """Where the values of one parameter stand: numbers by their size, others in a row."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        if not self._numeric:
            self._names = sorted({given.written(value) for value in values})
            return
        self._low, self._high = float(min(values)), float(max(values))
        self._log = self._low > 0 and self._high > _FAR * self._low
        self._known = sorted(set(values))

    def place(self, value: Any) -> float:
        if not self._numeric:
            return self._names.index(given.written(value)) / max(1, len(self._names) - 1)
        low, high, value = self._size(self._low), self._size(self._high), self._size(float(value))
        return (value - low) / (high - low) if high > low else 0.5

    def _size(self, value: float) -> float:
        return math.log(value) if self._log else value

    def ticks(self) -> list[tuple[float, str]]:
        if not self._numeric:
            last = max(1, len(self._names) - 1)
            return [(i / last, name[:24]) for i, name in enumerate(self._names)]
        if len(self._known) <= _FEW:
            return [(self.place(value), f"{value:.3g}") for value in self._known]
        low, high = self._size(self._low), self._size(self._high)
        sizes = [low + (high - low) * part for part in (0, 0.25, 0.5, 0.75, 1)]
        return [
            (part, f"{math.exp(size) if self._log else size:.3g}")
            for part, size in zip((0, 0.25, 0.5, 0.75, 1), sizes, strict=True)
        ]
