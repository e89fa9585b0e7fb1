"""What a plot of several runs contains, before it is drawn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.runs.curves import Curve, RunMetrics, build_scale, sort_metric_names
from echelon.runs.record import RunRecord
from echelon.tracking.summary import needs_log_scale, shorten_path
from echelon.utils.text import format_count
from echelon.views.run_settings import (
    find_setting_differences,
    format_settings,
    omit_majority_values,
)
from echelon.views.smoothing import MIN_POINTS_TO_SMOOTH, choose_smoothing_factor, smooth_values

_MAX_TITLE_PART = 48
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


@dataclass(frozen=True)
class PlotOptions:
    """What a person asked for."""

    metrics: Sequence[str]
    """Empty: the loss and all that was evaluated."""
    x: str
    smooth: float | None
    is_log: bool | None
    """None: where values fall far."""
    title: str
    """Empty: what the plot shows, in a line."""


@dataclass(frozen=True)
class PlotLine:
    """One metric of one run."""

    run_index: int
    """Which of the sheet's."""
    xs: list[float]
    ys: list[float]
    smoothed: list[float] | None
    """None where there is nothing to smooth."""
    best_index: int
    """The index of its best value."""


@dataclass(frozen=True)
class PlotPanel:
    """One metric of all runs."""

    metric: str
    best_is: str
    is_log: bool
    y_limit: float | None
    """Where the scale ends, when some run has left all others behind."""
    lines: list[PlotLine]

    @property
    def notes(self) -> str:
        """What a reader has to know beside its name."""
        better = "higher is better" if self.best_is == "max" else "lower is better"
        notes = [better] if self.metric.startswith("eval_") else []
        notes += ["log scale"] if self.is_log else []
        gone = sum(self.y_limit is not None and max(line.ys) > self.y_limit for line in self.lines)
        notes += [f"{gone} run{'s leave' if gone > 1 else ' leaves'} the scale"] if gone else []
        return ", ".join(notes)

    @property
    def best_line(self) -> PlotLine:
        """The line with the best value of all."""
        sign = -1 if self.best_is == "max" else 1
        return min(self.lines, key=lambda line: sign * line.ys[line.best_index])


@dataclass(frozen=True)
class LegendEntry:
    """The name of a run and the settings in which it differs from the others."""

    name: str
    settings: str

    def __str__(self) -> str:
        return f"{self.name}  {self.settings}".rstrip()


@dataclass(frozen=True)
class Plot:
    """Panels with one legend."""

    title: str
    x: str
    legend: list[LegendEntry]
    panels: list[PlotPanel]

    @property
    def x_range(self) -> tuple[float, float]:
        """The first and the last x of all lines. Panels share it, so they can be compared."""
        lines = [line for panel in self.panels for line in panel.lines]
        return min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines)


def build_plot(
    records: Sequence[RunRecord], metrics: Sequence[RunMetrics], options: PlotOptions
) -> Plot:
    """Return the plot of runs that have metrics."""
    names = _select_metrics(metrics, options.metrics, records[0].best_name)
    scales = [build_scale(options.x, r, m) for r, m in zip(records, metrics, strict=True)]
    furthest = max(s.convert(m.axis_points.steps[-1]) for s, m in zip(scales, metrics, strict=True))
    unit = _choose_time_unit(furthest) if options.x == "time" else ""
    size = _UNITS_S.get(unit, 1.0)
    panels = []
    for name in names:
        found = {run: m.curves[name] for run, m in enumerate(metrics) if name in m.curves}
        xs = {run: [scales[run].convert(s) / size for s in c.steps] for run, c in found.items()}
        panels.append(_build_panel(name, found, xs, options))
    x = f"time at work ({unit})" if unit else options.x
    legend, drawn = _build_legend(records), [panel for panel in panels if panel.lines]
    return Plot(options.title or _compose_title(legend, drawn, x), x, legend, drawn)


def _build_panel(
    name: str, curves: dict[int, Curve], xs: dict[int, list[float]], options: PlotOptions
) -> PlotPanel:
    y_limit = _find_y_limit([max(curve.values) for curve in curves.values()])
    every = [
        v for curve in curves.values() for v in curve.values if y_limit is None or v <= y_limit
    ]
    is_log = needs_log_scale(min(every), max(every)) if options.is_log is None else options.is_log
    is_best = next(iter(curves.values())).best_is
    lines, left_out = [], 0
    for run, curve in curves.items():
        indices = [i for i, value in enumerate(curve.values) if value > 0 or not is_log]
        left_out += len(curve.values) - len(indices)
        if indices:
            ys = [curve.values[i] for i in indices]
            means = [_get_mean(curve, i, is_log) for i in indices]
            best = ys.index(max(ys) if is_best == "max" else min(ys))
            lines.append(
                PlotLine(
                    run,
                    [xs[run][i] for i in indices],
                    ys,
                    _smooth_values(means, options.smooth, is_log),
                    best,
                )
            )
    if left_out:
        print(
            f"warning: {name}: {left_out} values have no logarithm and are left out",
            file=sys.stderr,
        )
    return PlotPanel(name, is_best, is_log, y_limit, lines)


def _get_mean(curve: Curve, index: int, is_log: bool) -> float:
    """Return the mean around a point; on a logarithmic scale the point itself where the mean, of
    values that are left out too, has no logarithm."""
    mean = curve.means[index]
    return curve.values[index] if is_log and mean <= 0 else mean


def _find_y_limit(peaks: Sequence[float]) -> float | None:
    """Return where the scale ends if one run diverges, which would press all others flat; else
    None."""
    near = 100 * statistics.median_low(peaks)
    if 0 < near < max(peaks):
        return 1.2 * max(peak for peak in peaks if peak <= near)
    return None


def _smooth_values(ys: Sequence[float], smooth: float | None, is_log: bool) -> list[float] | None:
    much = choose_smoothing_factor(ys) if smooth is None else smooth
    return smooth_values(ys, much, is_log) if much and len(ys) >= MIN_POINTS_TO_SMOOTH else None


def _select_metrics(metrics: Sequence[RunMetrics], wanted: Sequence[str], best: str) -> list[str]:
    """Return the metrics to draw; `rmse` may be typed for `eval_rmse`."""
    known = dict.fromkeys(name for m in metrics for name in m.curves)
    if not wanted:
        return sort_metric_names({curve.name for m in metrics for curve in m.default_curves}, best)
    named = [name if name in known else f"eval_{name}" for name in dict.fromkeys(wanted)]
    short_names = {bare if (bare := n.removeprefix("eval_")) not in known else n for n in known}
    faults = [
        Fault(f"--metric {asked}: none of these runs has it", suggest_nearest(asked, short_names))
        for asked, name in zip(dict.fromkeys(wanted), named, strict=True)
        if name not in known
    ]
    if faults:
        raise EchelonError(*faults, exit=ExitCode.NOT_FOUND)
    return named


def _choose_time_unit(longest_s: float) -> str:
    fitting_units = [unit for unit, size in _UNITS_S.items() if longest_s >= 2 * size]
    return fitting_units[-1] if fitting_units else "s"


def _compose_title(legend: Sequence[LegendEntry], panels: Sequence[PlotPanel], x: str) -> str:
    """Return a title such as `seed-1, seed-2: loss, eval_acc over step`. What would not fit into a
    line is counted."""

    def join(names: Sequence[str], word: str) -> str:
        text = ", ".join(names)
        return text if len(text) <= _MAX_TITLE_PART else format_count(len(names), word)

    runs = join([run.name for run in legend], "run")
    return f"{runs}: {join([panel.metric for panel in panels], 'metric')} over {x}"


def _build_legend(records: Sequence[RunRecord]) -> list[LegendEntry]:
    differ, _ = omit_majority_values(find_setting_differences(records))
    names = [record.name for record in records]
    if len(set(names)) < len(names):  # of several folders of runs
        names = [shorten_path(record.run.folder) for record in records]
    return [
        LegendEntry(name, format_settings(words)) for name, words in zip(names, differ, strict=True)
    ]
