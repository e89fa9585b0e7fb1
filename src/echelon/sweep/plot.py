"""`echelon sweep show NAME --plot FILE`: history, parameters and importance in one picture.

What the picture shows is computed first (SweepPlotData), then rendered: as a page that needs no
library (page.html), or as an image by matplotlib (plot_image.py, imported only then).
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.sweep.report import MIN_TRIALS_FOR_IMPORTANCE, SweepReport, has_result
from echelon.sweep.trial_command import format_override_value, format_short_value
from echelon.sweep.trial_store import TrialSummary
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_count
from echelon.views.html_page import fill_page_template
from echelon.views.palette import BLUE, GREEN, GREY, ORANGE, blend_by_goodness

_FILE_SUFFIXES = (".html", ".png", ".svg")
_MAX_LINES = 400
"""How many trials are drawn through the axes of the parameters. The best ones are chosen; more
lines could not be distinguished."""
_MAX_NAMED_VALUES = 6
"""Up to so many different values are all named on their axis, if they are round."""
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


class PlottedTrial(NamedTuple):
    """A trial in the picture. Serialised into the page by these names, as is ParameterAxis."""

    number: int
    name: str
    value: float
    state: str
    rank: int
    """0 for the best trial."""
    headline: str
    """Which trial, and how it ended."""
    notes: list[str]
    """What its value means among the others."""
    parameters: list[tuple[str, str]]
    places: list[float | None]
    """Its position on each axis, between 0 and 1; None if the trial has no such parameter."""
    colour: str


class ParameterAxis(NamedTuple):
    """One vertical axis of the parallel coordinates."""

    name: str
    low: float
    high: float
    is_log: bool
    is_whole: bool
    """Whether all values are whole numbers."""
    named_values: list[tuple[float, str]]
    """Positions between 0 and 1, and their labels; empty if the axis has round ticks instead."""


class SweepPlotData(NamedTuple):
    """All that a picture of a sweep shows."""

    title: str
    summary: str
    metric: str
    better: str
    """Which values are good, in words."""
    log: bool
    """Whether the metric has a logarithmic axis."""
    trials: list[PlottedTrial]
    """The best first."""
    best: list[tuple[int, float]]
    """The trials that were the best so far when they ended, and their values."""
    axes: list[ParameterAxis]
    importance: list[tuple[str, float]]
    importance_note: str
    """What the importance was computed from, or why there is none."""

    @property
    def lines(self) -> list[PlottedTrial]:
        """The trials that are drawn through the axes of the parameters."""
        return self.trials[:_MAX_LINES]


def build_plot_data(report: SweepReport) -> SweepPlotData:
    """Compute what the picture of a sweep shows; EchelonError without any result."""
    metric = report.metric
    ranked = [trial for trial in report.rank_trials() if has_result(trial)]
    if not ranked:
        raise EchelonError(
            Fault(
                f"the sweep {report.sweep.name} has no result to draw",
                "wait for the first one",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    names = list(dict.fromkeys(name for t in report.trials for name in t.parameters))
    rows = [{**trial.parameters, metric.name: trial.metric_value} for trial in ranked]
    scales = {
        name: _AxisScale([row[name] for row in rows if name in row])
        for name in [*names, metric.name]
        if any(name in row for row in rows)
    }
    values = [float(row[metric.name]) for row in rows]
    return SweepPlotData(
        title=f"{report.sweep.name}: {format_count(report.ended_count, 'trial')}",
        summary=_compose_summary(report, len(ranked)),
        metric=metric.name,
        better="higher is better" if metric.goal == "maximize" else "lower is better",
        log=_needs_log_axis(values),
        trials=[
            _build_plotted_trial(trial, rank, len(ranked), scales, metric.name)
            for rank, trial in enumerate(ranked)
        ],
        best=_find_records(sorted(ranked, key=lambda t: t.number), metric.minimize_sign),
        axes=[scale.build_axis(name) for name, scale in scales.items()],
        importance=list(report.importance.items()),
        importance_note=_describe_importance(report, ranked),
    )


def _needs_log_axis(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _LOG_SCALE_RATIO * min(values)


def _compose_summary(report: SweepReport, drawn: int) -> str:
    counts = report.count_states()
    words = {"finished": "finished", "pruned": "stopped early", "failed": "failed"}
    parts = [f"{counts[state]} {word}" for state, word in words.items() if counts.get(state)]
    if missing := report.ended_count - counts.get("failed", 0) - drawn:
        parts.append(f"{missing} without a finite value")
    if best := report.best:
        parts.append(f"best {report.metric.name} {best.metric_value:.5g} in trial {best.name}")
    return ", ".join(parts)


def _describe_importance(report: SweepReport, ranked: Sequence[TrialSummary]) -> str:
    if not report.importance and len(ranked) < MIN_TRIALS_FOR_IMPORTANCE:
        return f"can be told from {MIN_TRIALS_FOR_IMPORTANCE} results on"
    if not report.importance:
        return "cannot be computed from these results"
    stopped = sum(trial.state == "pruned" for trial in ranked)
    note = f"what distinguishes the best tenth of {format_count(len(ranked), 'trial')}"
    return f"{note}, {stopped} of them stopped early" if stopped else note


def _build_plotted_trial(
    trial: TrialSummary,
    rank: int,
    count: int,
    scales: Mapping[str, _AxisScale],
    metric: str,
) -> PlottedTrial:
    assert trial.metric_value is not None
    row = {**trial.parameters, metric: trial.metric_value}
    ending, notes = "finished", [f"number {rank + 1} of {count}" if rank else f"best of {count}"]
    if trial.state == "pruned":
        ending = "stopped early"
        made = f" after {format_count(len(trial.history), 'evaluation')}" if trial.history else ""
        notes.append(f"stopped{made}, when others were better; this is its value until then")
    return PlottedTrial(
        number=trial.number,
        name=trial.name,
        value=trial.metric_value,
        state=trial.state,
        rank=rank,
        headline=f"trial {trial.name} {ending}",
        notes=notes,
        parameters=[(name, format_short_value(value)) for name, value in trial.parameters.items()],
        places=[
            scale.find_position(row[name]) if name in row else None
            for name, scale in scales.items()
        ],
        colour=blend_by_goodness(1 - rank / max(1, count - 1)) if rank else ORANGE,
    )


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


class _AxisScale:
    """Positions of the values of one parameter: numbers by their size, others in a row."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._names: list[str] = []
        self._low, self._high, self._is_log = 0.0, 1.0, False
        self._numbers = [v for v in values if _is_finite_number(v)]
        if len(self._numbers) < len(values):
            self._names = sorted({format_override_value(value) for value in values})
            return
        self._low, self._high = float(min(self._numbers)), float(max(self._numbers))
        self._is_log = _needs_log_axis(self._numbers)

    def find_position(self, value: Any) -> float:
        """Return the position of a value between 0 and 1."""
        if self._names:
            return self._locate_name(format_override_value(value))
        low, high = self._transform(self._low), self._transform(self._high)
        return (self._transform(float(value)) - low) / (high - low) if high > low else 0.5

    def _locate_name(self, text: str) -> float:
        last = len(self._names) - 1
        return self._names.index(text) / last if last else 0.5

    def _transform(self, value: float) -> float:
        return math.log(value) if self._is_log else value / 2  # a range of 1e308 is finite then

    def build_axis(self, name: str) -> ParameterAxis:
        """Return the axis, with labels for its values if they are names, or few and round."""
        is_whole = all(float(value).is_integer() for value in self._numbers)
        labels = self._label_names() if self._names else self._label_numbers()
        return ParameterAxis(name, self._low, self._high, self._is_log, is_whole, labels)

    def _label_names(self) -> list[tuple[float, str]]:
        return [(self._locate_name(text), text) for text in self._names]

    def _label_numbers(self) -> list[tuple[float, str]]:
        distinct = sorted(set(self._numbers))
        texts = [f"{value:.{3 if len(distinct) > 1 else 6}g}" for value in distinct]
        is_round = [float(text) for text in texts] == distinct
        if len(distinct) > 1 and (len(distinct) > _MAX_NAMED_VALUES or not is_round):
            return []
        return [(self.find_position(v), text) for v, text in zip(distinct, texts, strict=True)]


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# --- how it is rendered ---


def render_sweep_page(plot_data: SweepPlotData) -> str:
    """Return the picture as an HTML page."""
    data = {
        **plot_data._asdict(),
        "trials": [trial._asdict() for trial in plot_data.trials],
        "axes": [axis._asdict() for axis in plot_data.axes],
        "most": _MAX_LINES,
        "colours": {"finished": BLUE, "pruned": GREY, "best": ORANGE, "importance": GREEN},
        "scale": [blend_by_goodness(step / 10) for step in range(11)],
    }
    return fill_page_template(Path(__file__).with_name("page.html"), plot_data.title, data)


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
