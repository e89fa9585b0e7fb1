"""The picture of a sweep as an image, by matplotlib, which importing this module imports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from echelon.views.palette import COLOURS
from echelon.views.plot_image import STYLE

if TYPE_CHECKING:
    from echelon.sweep.plot import SweepPlotData

_BEST_COLOUR, _PRUNED_COLOUR = COLOURS[1], "#b9bec6"


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
        figure.suptitle(data.title, fontsize=12, fontweight="bold")
        # Without a date, equal results give equal files.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_history(axes: Axes, data: SweepPlotData) -> None:
    """Draw the metric of every trial, and the best so far as steps."""
    for state, colour, marker in (("finished", COLOURS[0], "o"), ("pruned", _PRUNED_COLOUR, "x")):
        points = [point for point in data.points if point.state == state]
        xs, ys = [p.number for p in points], [p.value for p in points]
        axes.scatter(xs, ys, s=16, c=colour, marker=marker, label=state, zorder=2)
    if data.best:
        last = max(point.number for point in data.points)
        xs = [number for number, _ in data.best] + [last]
        ys = [value for _, value in data.best] + [data.best[-1][1]]
        axes.step(xs, ys, where="post", color=_BEST_COLOUR, label="best so far", zorder=3)
    if data.log:
        axes.set_yscale("log")
    axes.set_title(data.metric)
    axes.set_xlabel("trial")
    axes.legend(frameon=False, fontsize=8)


def _draw_importance(axes: Axes, data: SweepPlotData) -> None:
    names = [name for name, _ in reversed(data.importance)]
    axes.barh(names, [part for _, part in reversed(data.importance)], color=COLOURS[2])
    axes.set_title("importance")
    axes.grid(axis="y", visible=False)


def _draw_parallel_coordinates(axes: Axes, data: SweepPlotData) -> None:
    """Draw each trial as a line through its values on the axes of the parameters."""
    colours = matplotlib.colormaps["viridis"]
    for line in reversed(data.lines):  # the best last, so that it lies on top
        xs = [x for x, place in enumerate(line.places) if place is not None]
        ys = [place for place in line.places if place is not None]
        best = line.goodness == 1
        colour = _BEST_COLOUR if best else colours(line.goodness)
        width, visible = (2.4, 1.0) if best else (0.9, 0.25 + 0.5 * line.goodness)
        axes.plot(xs, ys, color=colour, linewidth=width, alpha=visible)
    for x, axis in enumerate(data.axes):
        axes.axvline(x, color="#8a8f98", linewidth=0.8)
        for place, text in axis.ticks:
            axes.annotate(text, (x, place), (3, 0), textcoords="offset points", fontsize=7)
    axes.set_xticks(range(len(data.axes)), [axis.name for axis in data.axes])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.margins(x=0.06)
    axes.set_title("parameters of all trials, the better the brighter")
