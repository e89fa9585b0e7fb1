"""`echelon jobs`: the status of runs as a table that fits the terminal, or as JSON."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from echelon.errors import Exit
from echelon.runs.find import find_runs, list_runs
from echelon.runs.status import RunStatus, add_progress, read_run_statuses
from echelon.utils.text import format_duration, truncate_text
from echelon.views.table_style import COLUMN_GAP, PIPED_WIDTH, STATE_STYLES, get_width

_RECENT_RUNS = 10
_REFRESH_S = 5.0
"""Slurm's controller answers all its users."""
_BAR_WIDTH = 12


def show_jobs(root: Path, names: Sequence[str], show_all: bool, as_json: bool, watch: bool) -> int:
    """Print the table once or, with ``watch``, again and again until Ctrl-C."""
    console = Console(soft_wrap=True)
    if not watch or as_json:
        standings, hidden, silence = _collect_statuses(root, names, show_all)
        if as_json:
            print(json.dumps([s.to_dict() for s in standings], indent=2))
        else:
            console.print(_render_table(standings, hidden, root, get_width(console)))
        if silence:
            print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
        return Exit.OK
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                standings, hidden, _ = _collect_statuses(root, names, show_all)
                live.update(
                    _render_table(standings, hidden, root, get_width(console)), refresh=True
                )
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return Exit.OK


def _collect_statuses(
    root: Path, names: Sequence[str], show_all: bool
) -> tuple[list[RunStatus], int, str]:
    """Return what is shown, how many runs are not, and why Slurm did not answer, if it did not."""
    wanted = [run for name in names for run in find_runs(name, str(root))]
    found, silence = read_run_statuses(wanted or list_runs(root))
    show_all = show_all or bool(names)
    recent = {s.folder for s in found[: len(found) if show_all else _RECENT_RUNS]}
    shown = [add_progress(s) for s in found if s.is_active or s.folder in recent]
    return shown, len(found) - len(shown), silence


# --- the table ---


def _render_table(statuses: Sequence[RunStatus], hidden: int, root: Path, width: int) -> Group:
    if not statuses:
        return Group(Text(f"no runs in {root.absolute()}; start one with `echelon train`"))
    head = ("RUN", "WHERE", "STATE", "SIZE", "PROGRESS", "LEFT", "AGE")
    rows = [_format_cells(s, bar=100 <= width < PIPED_WIDTH) for s in statuses]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    others = sum(widths[1:]) + COLUMN_GAP * (len(head) - 1)
    widths[0] = min(widths[0], max(len(head[0]), width - others))
    lines = [Text(_align_cells(head, widths), "bold")]
    for standing, row in zip(statuses, rows, strict=True):
        lines.append(_render_line(standing, row, widths))
        if standing.note:
            style = STATE_STYLES.get(standing.state, "") if not standing.is_active else "dim"
            lines.append(Text(truncate_text(f"  └ {standing.note}", width), style))
    if hidden:
        lines.append(Text(f"and {hidden} more: --all", "dim"))
    return Group(*lines)


def _format_cells(s: RunStatus, bar: bool) -> tuple[str, ...]:
    elsewhere = f"on {s.host}" if s.host not in (None, socket.gethostname()) else ""
    where = f"{s.launcher or '–'} {s.job or elsewhere}".rstrip()
    size = f"{s.nodes}×{-(-s.world // s.nodes)}" if s.nodes and s.world else "–"
    left = format_duration(s.eta_s) if s.eta_s is not None else ""
    return (
        s.run,
        where,
        s.state,
        size,
        _format_progress(s, bar),
        left,
        format_duration(time.time() - s.started),
    )


def _render_line(status: RunStatus, row: Sequence[str], widths: Sequence[int]) -> Text:
    line = Text(_align_cells(row, widths))
    state = sum(widths[:2]) + 2 * COLUMN_GAP
    line.stylize("bold", 0, widths[0])
    line.stylize(STATE_STYLES.get(status.state, ""), state, state + widths[2])
    return line


def _align_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, times to the right."""
    aligned = [
        f"{truncate_text(cell, w):>{w}}"
        if i >= len(cells) - 2
        else f"{truncate_text(cell, w):<{w}}"
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return (" " * COLUMN_GAP).join(aligned).rstrip()


def _format_progress(s: RunStatus, bar: bool) -> str:
    if s.step is None and s.total_steps is None:
        return ""
    if not s.total_steps:
        return f"step {s.step}"
    part = min(1.0, (s.step or 0) / s.total_steps)
    full = int(part * _BAR_WIDTH)
    drawn = "━" * full + "─" * (_BAR_WIDTH - full) + " " if bar else ""
    return f"{drawn}{part:4.0%} {s.step or 0}/{s.total_steps}"
