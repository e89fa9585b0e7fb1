"""What a picture of a sweep shows, before it is drawn: the same for a page and for matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from echelon.errors import EchelonError, Exit, Fault
from echelon.sweep import trial_command
from echelon.sweep.report import SweepReport
from echelon.sweep.trial_store import TrialSummary

_MAX_LINES = 400
"""Trials drawn through the parameters, the best of them: more are only a stain."""
_MAX_NAMED_VALUES = 5
"""So many different values are all named on their axis."""
_LOG_SCALE_RATIO = 50.0
"""A range over which a parameter is better seen by its logarithm."""


class TrialPoint(NamedTuple):
    number: int
    value: float
    state: str
    label: str


class ParameterAxis(NamedTuple):
    name: str
    ticks: list[tuple[float, str]]
    """Places between 0 and 1, and what stands there."""


class TrialLine(NamedTuple):
    number: int
    places: list[float | None]
    """On every axis, between 0 and 1."""
    goodness: float
    """1 for the best trial, 0 for the worst."""
    label: str


class SweepPlotData(NamedTuple):
    title: str
    metric: str
    log: bool
    points: list[TrialPoint]
    best: list[tuple[int, float]]
    """The best so far, where it changes."""
    axes: list[ParameterAxis]
    lines: list[TrialLine]
    importance: list[tuple[str, float]]


def build_plot_data(report: SweepReport) -> SweepPlotData:
    known = [
        r for r in report.trials if r.metric_value is not None and math.isfinite(r.metric_value)
    ]
    known = [r for r in known if r.state in ("finished", "pruned")]
    if not known:
        raise EchelonError(
            Fault(f"the sweep {report.sweep.name} has no result to draw", "wait for the first one"),
            exit=Exit.NOT_FOUND,
        )
    names = list(dict.fromkeys(name for result in known for name in result.parameters))
    rows = [{**r.parameters, report.metric.name: r.metric_value} for r in known]
    axes = {
        n: _AxisScale([row[n] for row in rows if n in row]) for n in [*names, report.metric.name]
    }
    ranked = [r for r in report.rank_trials() if r in known]
    last = max(1, len(ranked) - 1)
    lines = [
        TrialLine(
            r.number,
            _find_positions({**r.parameters, report.metric.name: r.metric_value}, axes),
            1 - place / last,
            _format_label(r, report.metric.name),
        )
        for place, r in enumerate(ranked[:_MAX_LINES])
    ]
    values = [r.metric_value for r in known if r.metric_value is not None]
    return SweepPlotData(
        f"{report.sweep.name}: {report.ended_count} trials",
        report.metric.name,
        min(values) > 0 and max(values) > _LOG_SCALE_RATIO * min(values),
        [
            TrialPoint(
                r.number, r.metric_value or 0.0, r.state, _format_label(r, report.metric.name)
            )
            for r in known
        ],
        _find_records(known, report.metric.sign),
        [ParameterAxis(name, scale.build_ticks()) for name, scale in axes.items()],
        lines,
        list(report.importance.items()),
    )


def _format_label(result: TrialSummary, metric: str) -> str:
    value = f"{metric} {result.metric_value:.5g}" if result.metric_value is not None else ""
    return f"trial {result.name} {result.state}, {value}: {trial_command.format_parameters(result.parameters)}"


def _find_records(known: Sequence[TrialSummary], sign: float) -> list[tuple[int, float]]:
    best: list[tuple[int, float]] = []
    for result in known:
        value = result.metric_value
        if value is None or result.state != "finished":
            continue
        if not best or sign * value < sign * best[-1][1]:
            best.append((result.number, value))
    return best


def _find_positions(row: Mapping[str, Any], axes: Mapping[str, _AxisScale]) -> list[float | None]:
    return [scale.find_position(row[name]) if name in row else None for name, scale in axes.items()]


class _AxisScale:
    """Where the values of one parameter stand: numbers by their size, others in a row."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        if not self._numeric:
            self._names = sorted({trial_command.format_value(value) for value in values})
            return
        self._low, self._high = float(min(values)), float(max(values))
        self._log = self._low > 0 and self._high > _LOG_SCALE_RATIO * self._low
        self._known = sorted(set(values))

    def find_position(self, value: Any) -> float:
        if not self._numeric:
            return self._names.index(trial_command.format_value(value)) / max(
                1, len(self._names) - 1
            )
        low, high, value = (
            self._transform(self._low),
            self._transform(self._high),
            self._transform(float(value)),
        )
        return (value - low) / (high - low) if high > low else 0.5

    def _transform(self, value: float) -> float:
        return math.log(value) if self._log else value

    def build_ticks(self) -> list[tuple[float, str]]:
        if not self._numeric:
            last = max(1, len(self._names) - 1)
            return [(i / last, name[:24]) for i, name in enumerate(self._names)]
        if len(self._known) <= _MAX_NAMED_VALUES:
            return [(self.find_position(value), f"{value:.3g}") for value in self._known]
        low, high = self._transform(self._low), self._transform(self._high)
        sizes = [low + (high - low) * part for part in (0, 0.25, 0.5, 0.75, 1)]
        return [
            (part, f"{math.exp(size) if self._log else size:.3g}")
            for part, size in zip((0, 0.25, 0.5, 0.75, 1), sizes, strict=True)
        ]
