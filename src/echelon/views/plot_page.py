"""Curves as one HTML page that needs nothing else: data, style and script are all in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.views.html_page import fill_page_template
from echelon.views.palette import COLOURS, DASHES
from echelon.views.plot_data import Plot, PlotLine, PlotPanel
from echelon.views.smoothing import MIN_POINTS_TO_SMOOTH, select_point_indices

_MAX_POINTS = 60_000
"""Of all lines together; a page of about a megabyte at the most."""
_MIN_LINE_POINTS = 300
_MAX_LINE_POINTS = 4000
_COUNTED_AXES = ("step", "samples")
"""Whose ticks are whole numbers. There are half epochs."""


def render_page(plot: Plot) -> str:
    """Return the page of a plot."""
    template = Path(__file__).with_name("page.html")
    return fill_page_template(template, plot.title, _to_json_data(plot))


def _to_json_data(plot: Plot) -> dict[str, Any]:
    lines = sum(len(panel.lines) for panel in plot.panels)
    limit = min(_MAX_LINE_POINTS, max(_MIN_LINE_POINTS, _MAX_POINTS // lines))
    return {
        "x": plot.x,
        "whole": plot.x in _COUNTED_AXES,
        "few": MIN_POINTS_TO_SMOOTH,
        "colours": COLOURS,
        "dashes": DASHES,
        "runs": [{"name": run.name, "differs": run.settings} for run in plot.legend],
        "panels": [_encode_panel(panel, limit) for panel in plot.panels],
    }


def _encode_panel(panel: PlotPanel, limit: int) -> dict[str, Any]:
    return {
        "metric": panel.metric,
        "best": panel.best_is,
        "log": panel.is_log,
        "top": panel.y_limit,
        "notes": panel.notes,
        "lines": [_encode_line(line, limit) for line in panel.lines],
    }


def _encode_line(line: PlotLine, limit: int) -> dict[str, Any]:
    indices = select_point_indices(line.ys, limit, line.best_index)
    smoothed = line.smoothed
    return {
        "run": line.run_index,
        "x": [_round_number(line.xs[i]) for i in indices],
        "y": [_round_number(line.ys[i]) for i in indices],
        "s": [_round_number(smoothed[i]) for i in indices] if smoothed else None,
        "best": indices.index(line.best_index),
    }


def _round_number(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e5 or value % 1 else value
