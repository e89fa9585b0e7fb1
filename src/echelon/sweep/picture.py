"""A sweep as a picture, by matplotlib. Importing this file imports it."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from echelon.sweep.drawing import Drawing
from echelon.view.figure import STYLE
from echelon.view.palette import COLOURS

_GOOD, _BAD = COLOURS[1], "#b9bec6"


def save(made: Drawing, path: Path) -> None:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(12.0, 7.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 3)
        parts = bool(made.importance)
        _history(figure.add_subplot(grid[0, : 2 if parts else 3]), made)
        if parts:
            _importance(figure.add_subplot(grid[0, 2]), made)
        _parallel(figure.add_subplot(grid[1, :]), made)
        figure.suptitle(made.title, fontsize=12, fontweight="bold")
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=date)


def _history(axes: Axes, made: Drawing) -> None:
    for state, colour, marker in (("finished", COLOURS[0], "o"), ("pruned", _BAD, "x")):
        points = [point for point in made.points if point.state == state]
        xs, ys = [p.number for p in points], [p.value for p in points]
        axes.scatter(xs, ys, s=16, c=colour, marker=marker, label=state, zorder=2)
    if made.best:
        last = max(point.number for point in made.points)
        xs = [number for number, _ in made.best] + [last]
        ys = [value for _, value in made.best] + [made.best[-1][1]]
        axes.step(xs, ys, where="post", color=_GOOD, label="best so far", zorder=3)
    if made.log:
        axes.set_yscale("log")
    axes.set_title(made.metric)
    axes.set_xlabel("trial")
    axes.legend(frameon=False, fontsize=8)


def _importance(axes: Axes, made: Drawing) -> None:
    names = [name for name, _ in reversed(made.importance)]
    axes.barh(names, [part for _, part in reversed(made.importance)], color=COLOURS[2])
    axes.set_title("importance")
    axes.grid(axis="y", visible=False)


def _parallel(axes: Axes, made: Drawing) -> None:
    colours = matplotlib.colormaps["viridis"]
    for line in reversed(made.lines):  # the best on top
        xs = [x for x, place in enumerate(line.places) if place is not None]
        ys = [place for place in line.places if place is not None]
        best = line.goodness == 1
        colour = _GOOD if best else colours(line.goodness)
        width, visible = (2.4, 1.0) if best else (0.9, 0.25 + 0.5 * line.goodness)
        axes.plot(xs, ys, color=colour, linewidth=width, alpha=visible)
    for x, axis in enumerate(made.axes):
        axes.axvline(x, color="#8a8f98", linewidth=0.8)
        for place, text in axis.ticks:
            axes.annotate(text, (x, place), (3, 0), textcoords="offset points", fontsize=7)
    axes.set_xticks(range(len(made.axes)), [axis.name for axis in made.axes])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.margins(x=0.06)
    axes.set_title("parameters of all trials, the better the brighter")
