"""`echelon sweep show NAME --plot FILE`: history, parameters and importance in one picture.

What the picture shows is computed first (SweepPlotData), then rendered: as a page that needs no
library (page.html), or as an image by matplotlib (plot_image.py, imported only then).
"""

from __future__ import annotations

import html
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.sweep.report import SweepReport
from echelon.sweep.trial_command import describe_parameters, format_override_value
from echelon.sweep.trial_store import TrialSummary
from echelon.utils.os_errors import format_os_error_reason

_FILE_SUFFIXES = (".html", ".png", ".svg")
_MAX_LINES = 400
"""How many trials are drawn through the axes of the parameters. The best ones are chosen; more
lines could not be distinguished."""
_MAX_NAMED_VALUES = 5
"""Up to so many different values are all named on their axis."""
_LOG_SCALE_RATIO = 50.0
"""Values whose largest is more than so many times the smallest are drawn by their logarithm."""


def plot_sweep(report: SweepReport, output: Path) -> None:
    """Write the picture of a sweep; the suffix of the file says as what."""
    suffix = output.suffix.lower()
    if suffix not in _FILE_SUFFIXES:
        raise EchelonError(
            Fault(
                f"--plot {output}: what kind of file is that?",
                f"end it in {', '.join(_FILE_SUFFIXES)}",
            )
        )
    data = build_plot_data(report)
    # Not by utils.files: matplotlib knows the format by the suffix, which has to be the last part.
    temporary = output.with_name(f".{output.stem}.{secrets.token_hex(4)}{suffix}")
    try:
        if suffix == ".html":
            temporary.write_text(render_sweep_page(data), encoding="utf-8")
        else:
            _save_image(data, temporary)
        os.replace(temporary, output)
    except OSError as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(f"--plot {output} cannot be written: {reason}", "give another place")
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


# --- what is shown ---


class HistoryPoint(NamedTuple):
    """A trial in the history. Serialised into the page by these names, as are the next three."""

    number: int
    value: float
    state: str
    label: str


class ParameterAxis(NamedTuple):
    """One vertical axis of the parallel coordinates."""

    name: str
    ticks: list[tuple[float, str]]
    """Positions between 0 and 1, and their labels."""


class ParallelCoordinatesLine(NamedTuple):
    """A trial in the parallel coordinates."""

    number: int
    places: list[float | None]
    """Its position on each axis, between 0 and 1; None if the trial has no such parameter."""
    goodness: float
    """1 for the best trial, 0 for the worst."""
    label: str


class SweepPlotData(NamedTuple):
    """All that a picture of a sweep shows."""

    title: str
    metric: str
    log: bool
    """Whether the metric has a logarithmic axis."""
    points: list[HistoryPoint]
    best: list[tuple[int, float]]
    """The trials that were the best so far when they ended, and their values."""
    axes: list[ParameterAxis]
    lines: list[ParallelCoordinatesLine]
    importance: list[tuple[str, float]]


def build_plot_data(report: SweepReport) -> SweepPlotData:
    """Compute what the picture of a sweep shows; EchelonError without any result."""
    metric = report.metric
    trials = [
        trial
        for trial in report.trials
        if trial.state in ("finished", "pruned")
        and trial.metric_value is not None
        and math.isfinite(trial.metric_value)
    ]
    if not trials:
        raise EchelonError(
            Fault(
                f"the sweep {report.sweep.name} has no result to draw",
                "wait for the first one",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    rows = {t.number: {**t.parameters, metric.name: t.metric_value} for t in trials}
    scales = {
        name: _AxisScale([row[name] for row in rows.values() if name in row])
        for name in [*names, metric.name]
    }
    ranked = [trial for trial in report.rank_trials() if trial.number in rows]
    last = max(1, len(ranked) - 1)
    lines = [
        ParallelCoordinatesLine(
            trial.number,
            _locate_trial_on_axes(rows[trial.number], scales),
            1 - rank / last,
            _format_trial_label(trial, metric.name),
        )
        for rank, trial in enumerate(ranked[:_MAX_LINES])
    ]
    values = [trial.metric_value for trial in trials if trial.metric_value is not None]
    return SweepPlotData(
        title=f"{report.sweep.name}: {report.ended_count} trials",
        metric=metric.name,
        log=min(values) > 0 and max(values) > _LOG_SCALE_RATIO * min(values),
        points=[
            HistoryPoint(
                t.number, t.metric_value or 0.0, t.state, _format_trial_label(t, metric.name)
            )
            for t in trials
        ],
        best=_find_records(trials, metric.minimize_sign),
        axes=[ParameterAxis(name, scale.build_ticks()) for name, scale in scales.items()],
        lines=lines,
        importance=list(report.importance.items()),
    )


def _format_trial_label(trial: TrialSummary, metric: str) -> str:
    value = f"{metric} {trial.metric_value:.5g}" if trial.metric_value is not None else ""
    return f"trial {trial.name} {trial.state}, {value}: {describe_parameters(trial.parameters)}"


def _find_records(trials: Sequence[TrialSummary], sign: float) -> list[tuple[int, float]]:
    """Return the finished trials that were better than all before them."""
    records: list[tuple[int, float]] = []
    for trial in trials:
        value = trial.metric_value
        if value is None or trial.state != "finished":
            continue
        if not records or sign * value < sign * records[-1][1]:
            records.append((trial.number, value))
    return records


def _locate_trial_on_axes(
    row: Mapping[str, Any], scales: Mapping[str, _AxisScale]
) -> list[float | None]:
    return [
        scale.find_position(row[name]) if name in row else None for name, scale in scales.items()
    ]


class _AxisScale:
    """Positions of the values of one parameter: numbers by their size, others in a row."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._is_numeric = all(
            isinstance(v, (int, float)) and not isinstance(v, bool) for v in values
        )
        if not self._is_numeric:
            self._names = sorted({format_override_value(value) for value in values})
            return
        self._low, self._high = float(min(values)), float(max(values))
        self._is_log = self._low > 0 and self._high > _LOG_SCALE_RATIO * self._low
        self._distinct = sorted(set(values))

    def find_position(self, value: Any) -> float:
        """Return the position of a value between 0 and 1."""
        if not self._is_numeric:
            return self._names.index(format_override_value(value)) / max(1, len(self._names) - 1)
        low, high = self._transform(self._low), self._transform(self._high)
        return (self._transform(float(value)) - low) / (high - low) if high > low else 0.5

    def _transform(self, value: float) -> float:
        return math.log(value) if self._is_log else value

    def build_ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of an axis."""
        if not self._is_numeric:
            last = max(1, len(self._names) - 1)
            return [(i / last, name[:24]) for i, name in enumerate(self._names)]
        if len(self._distinct) <= _MAX_NAMED_VALUES:
            return [(self.find_position(value), f"{value:.3g}") for value in self._distinct]
        low, high = self._transform(self._low), self._transform(self._high)
        positions = (0, 0.25, 0.5, 0.75, 1)
        values = [low + (high - low) * position for position in positions]
        return [
            (position, f"{math.exp(value) if self._is_log else value:.3g}")
            for position, value in zip(positions, values, strict=True)
        ]


# --- how it is rendered ---


def render_sweep_page(plot_data: SweepPlotData) -> str:
    """Return the picture as an HTML page.

    Names and values may come from anybody. They are data for the script, which writes them as
    text, and `<` is escaped so that it cannot end the data early.
    """
    data = {
        **plot_data._asdict(),
        "points": [point._asdict() for point in plot_data.points],
        "axes": [axis._asdict() for axis in plot_data.axes],
        "lines": [line._asdict() for line in plot_data.lines],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("%TITLE%", html.escape(plot_data.title)).replace("%DATA%", text)


def _save_image(data: SweepPlotData, path: Path) -> None:
    try:
        from echelon.sweep.plot_image import save_image
    except ModuleNotFoundError:
        raise EchelonError(
            Fault(
                f"--plot …{path.suffix} needs matplotlib, which is not installed",
                "pip install 'echelon[plot]', or --plot sweep.html, which needs nothing",
            )
        ) from None
    save_image(data, path)
