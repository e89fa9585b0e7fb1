"""Curves as an image, by matplotlib. Importing this module imports matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from echelon.views.palette import COLOURS, DASHES
from echelon.views.plot_data import Plot, PlotLine, PlotPanel
from echelon.views.smoothing import select_point_indices

_MAX_POINTS = 4000
"""Of a line: more than a printed page can show, few enough for an .svg to stay small."""
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a8f98",
    "axes.titlelocation": "left",
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.6,
    "xtick.color": "#50555c",
    "ytick.color": "#50555c",
    "svg.fonttype": "none",
    "svg.hashsalt": "echelon",
}


def save_figure(sheet: Plot, path: Path) -> None:
    """Draw the plot into a .png or .svg file."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = build_figure(sheet)
        # Without a date, and with a fixed `svg.hashsalt`, the same curves give the same bytes.
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=date)


def build_figure(sheet: Plot) -> Figure:
    """Return the plot as a figure of matplotlib, in the style that is set."""
    count = len(sheet.panels)
    columns_of_panels = count if count < 4 else 2 if count == 4 else 3
    rows_of_panels = -(-count // columns_of_panels)
    wide = {1: 7.2, 2: 10.4}.get(columns_of_panels, 13.5)
    columns = _count_legend_columns(sheet, wide)
    legend_high = 0.2 * -(-len(sheet.legend) // columns) + 0.15
    high = rows_of_panels * (4.2 if columns_of_panels == 1 else 3.4) + legend_high + 0.35
    air = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.09, wspace=0.03)
    figure = Figure(figsize=(wide, high), layout=air)
    FigureCanvasAgg(figure)
    for number, panel in enumerate(sheet.panels, 1):
        axes = figure.add_subplot(rows_of_panels, columns_of_panels, number)
        _draw_panel(axes, panel, sheet)
    figure.suptitle(escape_math(sheet.title), fontsize=12, fontweight="bold", wrap=True)
    handles = [_make_legend_line(run) for run in range(len(sheet.legend))]
    figure.legend(
        handles,
        [escape_math(str(run)) for run in sheet.legend],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=2.6,
    )
    return figure


def escape_math(name: str) -> str:
    """Return a name with its dollars escaped, so that two of them do not make a formula."""
    return name.replace("$", r"\$")


def _count_legend_columns(sheet: Plot, wide: float) -> int:
    """Return how many columns fit; a character is about 0.065 inches wide, a sample of a line half
    an inch."""
    longest = max(len(str(run)) for run in sheet.legend)
    return max(1, min(len(sheet.legend), int(wide / (0.065 * longest + 0.6))))


def _make_legend_line(run: int) -> Line2D:
    """As in the legend."""
    colour, dash = COLOURS[run % len(COLOURS)], DASHES[run // len(COLOURS) % len(DASHES)]
    return Line2D([], [], color=colour, dashes=dash, linewidth=1.8)


def _draw_panel(axes: Axes, panel: PlotPanel, sheet: Plot) -> None:
    for line in panel.lines:
        _draw_line(axes, line, is_alone=len(panel.lines) == 1)
    if panel.is_log:
        axes.set_yscale("log")
    if panel.y_limit is not None:
        low = min(y for line in panel.lines for y in line.ys)
        axes.set_ylim(
            low / 1.2 if panel.is_log else low - (panel.y_limit - low) / 20, panel.y_limit
        )
    if panel.is_log:
        label_log_axis(axes)
    axes.set_title(escape_math(panel.metric), fontsize=10.5, fontweight="bold")
    axes.set_title(panel.notes, loc="right", fontsize=8, color="#6b7078")
    axes.set_xlabel(sheet.x, color="#50555c")
    first, last = sheet.x_range
    if last >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    air = 0.02 * (last - first) or 0.5  # around a single point
    axes.set_xlim(first - air, last + air)
    if panel.metric.startswith("eval_"):
        _mark_best(axes, panel)


def _draw_line(axes: Axes, line: PlotLine, is_alone: bool) -> None:
    indices = select_point_indices(line.ys, _MAX_POINTS, line.best_index)
    xs, ys = [line.xs[i] for i in indices], [line.ys[i] for i in indices]
    style = _make_legend_line(line.run_index)
    colour, dash = style.get_color(), DASHES[line.run_index // len(COLOURS) % len(DASHES)]
    point = "o" if len(ys) == 1 else ""
    if line.smoothed is None:
        axes.plot(xs, ys, color=colour, dashes=dash, linewidth=1.5, marker=point, markersize=4)
        return
    axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.3 if is_alone else 0.2)
    smoothed = [line.smoothed[i] for i in indices]
    axes.plot(xs, smoothed, color=colour, dashes=dash, linewidth=1.7)


def label_log_axis(axes: Axes) -> None:
    """Give the y axis numbers where it has less than three decades."""
    low, high = axes.get_ylim()
    if high / low < 1e3:  # otherwise there may be one number on the axis, or none
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_best(axes: Axes, panel: PlotPanel) -> None:
    """Mark each run's best value with a dot, and the best of all with its number."""
    best = panel.best_line
    for line in sorted(panel.lines, key=lambda line: line is best):  # on top of others
        at = (line.xs[line.best_index], line.ys[line.best_index])
        style = {"color": _make_legend_line(line.run_index).get_color(), "markeredgecolor": "white"}
        axes.plot(*at, marker="o", markersize=6, zorder=5, **style)  # type: ignore[arg-type]
    axes.annotate(
        f"{best.ys[best.best_index]:.4g}",
        (best.xs[best.best_index], best.ys[best.best_index]),
        xytext=(0, -13 if panel.best_is == "min" else 7),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        fontweight="bold",
        color=_make_legend_line(best.run_index).get_color(),
    )
    axes.margins(y=0.12)
