"""Curves as one page that needs nothing else: data, style and script are all in the file."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from echelon.view.palette import COLOURS, DASHES, ON_DARK
from echelon.view.sheet import Line, Panel, Sheet
from echelon.view.smooth import FEW, thinned

_POINTS = 60_000
"""Of all lines together; a page of about a megabyte at the most."""
_FEWEST = 300
_MOST = 4000


def page(sheet: Sheet) -> str:
    """Names come from folders and settings, so they may hold anything: they are data to the script,
    which writes them as text, and `<` cannot end the data early."""
    data = json.dumps(_data(sheet), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    title = html.escape(sheet.title or ", ".join(run.name for run in sheet.runs[:3]))
    return template.replace("%TITLE%", title).replace("%DATA%", data)


def _data(sheet: Sheet) -> dict[str, Any]:
    lines = sum(len(panel.lines) for panel in sheet.panels)
    limit = min(_MOST, max(_FEWEST, _POINTS // lines))
    return {
        "title": sheet.title,
        "x": sheet.x,
        "few": FEW,
        "colours": {"light": COLOURS, "dark": ON_DARK},
        "dashes": DASHES,
        "runs": [{"name": run.name, "differs": run.differs} for run in sheet.runs],
        "panels": [_panel(panel, limit) for panel in sheet.panels],
    }


def _panel(panel: Panel, limit: int) -> dict[str, Any]:
    return {
        "metric": panel.metric,
        "best": panel.is_best,
        "log": panel.log,
        "top": panel.top,
        "notes": panel.notes,
        "lines": [_line(line, limit) for line in panel.lines],
    }


def _line(line: Line, limit: int) -> dict[str, Any]:
    kept = thinned(line.ys, limit, line.best)
    smoothed = line.smoothed
    return {
        "run": line.run,
        "x": [_short(line.xs[i]) for i in kept],
        "y": [_short(line.ys[i]) for i in kept],
        "s": [_short(smoothed[i]) for i in kept] if smoothed else None,
        "best": kept.index(line.best),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e5 or value % 1 else value
