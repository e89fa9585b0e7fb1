"""The picture of a sweep as an image, by matplotlib, which importing this module imports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, PercentFormatter

from echelon.views.palette import BLUE, GREEN, GREY, ORANGE
from echelon.views.plot_image import STYLE, escape_math, label_log_axis

if TYPE_CHECKING:
    from echelon.sweep.plot import ParameterAxis, SweepPlotData

_MAX_NAME = 36
"""Characters of a name of a parameter; its end says the most."""
_MAX_NAMES = 130
"""Characters that fit beside each other below the axes of the parameters."""
_MIN_LABEL_GAP = 0.06
"""Of the height: labels of an axis that are nearer than this would lie on each other."""


def save_image(data: SweepPlotData, path: Path) -> None:
    """Draw the picture into a file, whose suffix says the format."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(12.0, 7.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 3)
        has_importance = bool(data.importance)
        _draw_history(figure.add_subplot(grid[0, : 2 if has_importance else 3]), data)
        if has_importance:
            _draw_importance(figure.add_subplot(grid[0, 2]), data)
        _draw_parallel_coordinates(figure.add_subplot(grid[1, :]), data)
        figure.suptitle(escape_math(data.title), fontsize=12, fontweight="bold")
        # Without a date, equal results give equal files.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_history(axes: Axes, data: SweepPlotData) -> None:
    """Draw the metric of every trial, and the best so far as steps."""
    marks = {"finished": {"color": BLUE}, "pruned": {"facecolors": "none", "edgecolors": GREY}}
    names = {"finished": "finished", "pruned": "stopped early"}
    for state, style in marks.items():
        trials = [trial for trial in data.trials if trial.state == state]
        if trials:
            xs, ys = [t.number for t in trials], [t.value for t in trials]
            axes.scatter(xs, ys, s=18, label=names[state], zorder=2, **style)  # type: ignore[arg-type]
    if data.best:
        last = max(trial.number for trial in data.trials)
        xs = [number for number, _ in data.best] + [last]
        ys = [value for _, value in data.best] + [data.best[-1][1]]
        axes.step(xs, ys, where="post", color=ORANGE, label="best so far", zorder=3)
    if data.log:
        axes.set_yscale("log")
        label_log_axis(axes)
    axes.set_title(escape_math(data.metric))
    notes = [data.better] + ["log scale"] * data.log
    axes.set_title(", ".join(notes), loc="right", fontsize=8, color="#6b7078")
    axes.set_xlabel("trial", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    below = (1.0, -0.06)  # beside the name of the axis, where no trial can be
    axes.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=below, ncols=3)


def _draw_importance(axes: Axes, data: SweepPlotData) -> None:
    bars = list(reversed(data.importance))
    axes.barh(range(len(bars)), [part for _, part in bars], color=GREEN)
    axes.set_yticks(range(len(bars)), [_shorten_name(name) for name, _ in bars])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("importance")
    axes.grid(axis="y", visible=False)


def _draw_parallel_coordinates(axes: Axes, data: SweepPlotData) -> None:
    """Draw each trial as a line through its values on the axes of the parameters."""
    for trial in reversed(data.lines):  # the best last, so that it lies on top
        xs = [x for x, place in enumerate(trial.places) if place is not None]
        ys = [place for place in trial.places if place is not None]
        width, visible = (0.9, 0.6) if trial.rank else (2.4, 1.0)
        axes.plot(xs, ys, color=trial.colour, linewidth=width, alpha=visible)
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for x, axis in enumerate(data.axes):
        axes.axvline(x, color="#8a8f98", linewidth=0.8)
        for place, text in _select_labels(axis):
            axes.annotate(
                escape_math(text),
                (x, place),
                (4, 0),
                textcoords="offset points",
                fontsize=7,
                va="center",
                bbox=plate,  # so that no line strikes the text through
                zorder=4,
            )
    names = [_shorten_name(axis.name) for axis in data.axes]
    axes.set_xticks(range(len(data.axes)), names)
    if max(map(len, names)) * len(names) > _MAX_NAMES:
        axes.tick_params("x", rotation=14, labelsize=7)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.margins(x=0.06)
    axes.set_title("parameters: the better the bluer, the best in orange")


def _select_labels(axis: ParameterAxis) -> list[tuple[float, str]]:
    """Return positions and texts of an axis, without those that would lie on another."""
    kept: list[tuple[float, str]] = []
    for place, text in axis.named_values or _make_round_labels(axis):
        if all(abs(place - other) >= _MIN_LABEL_GAP for other, _ in kept):
            kept.append((place, _shorten_name(text)))
    return kept


def _make_round_labels(axis: ParameterAxis) -> list[tuple[float, str]]:
    """Return round numbers between the ends of an axis, which differ."""
    steps = [1, 2, 5, 10] if axis.is_whole else [1, 2, 2.5, 5, 10]
    locator: Locator = MaxNLocator(6, steps=steps, integer=axis.is_whole)
    if axis.is_log:
        few, many = (1.0,), (1.0, 2.0, 5.0)
        locator = LogLocator(subs=few if axis.high / axis.low > 1e3 else many, numticks=9)
    transform = math.log if axis.is_log else float
    low, high = transform(axis.low), transform(axis.high)
    values = [v for v in locator.tick_values(axis.low, axis.high) if axis.low <= v <= axis.high]
    return [((transform(v) - low) / (high - low), f"{v:.10g}") for v in values]


def _shorten_name(name: str) -> str:
    short = name if len(name) <= _MAX_NAME else "…" + name[1 - _MAX_NAME :]
    return escape_math(short)
