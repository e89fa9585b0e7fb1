"""`echelon jobs`: runs as a table that fits the screen, or as JSON."""

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
from echelon.jobs.standing import Standing, all_runs, stand, with_progress
from echelon.jobs.table import GAP, STYLES, UNBROKEN, columns
from echelon.runs import find_runs
from echelon.utils.text import format_duration, truncate_text

_RECENT = 10
_WATCH_S = 5.0
"""Slurm's controller answers all its users."""
_BAR = 12


def show(root: Path, names: Sequence[str], everything: bool, as_json: bool, watch: bool) -> int:
    console = Console(soft_wrap=True)
    if not watch or as_json:
        standings, hidden, silence = _look(root, names, everything)
        if as_json:
            print(json.dumps([s.to_dict() for s in standings], indent=2))
        else:
            console.print(_table(standings, hidden, root, columns(console)))
        if silence:
            print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
        return Exit.OK
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                standings, hidden, _ = _look(root, names, everything)
                live.update(_table(standings, hidden, root, columns(console)), refresh=True)
                time.sleep(_WATCH_S)
        except KeyboardInterrupt:
            return Exit.OK


def _look(root: Path, names: Sequence[str], everything: bool) -> tuple[list[Standing], int, str]:
    """What is shown, how many are not, and why Slurm is silent, if it is."""
    wanted = [run for name in names for run in find_runs(name, str(root))]
    found, silence = stand(wanted or all_runs(root.absolute()))
    everything = everything or bool(names)
    recent = {s.folder for s in found[: len(found) if everything else _RECENT]}
    shown = [with_progress(s) for s in found if s.active or s.folder in recent]
    return shown, len(found) - len(shown), silence


# --- the table ---


def _table(standings: Sequence[Standing], hidden: int, root: Path, width: int) -> Group:
    if not standings:
        return Group(Text(f"no runs in {root.absolute()}; start one with `echelon train`"))
    head = ("RUN", "WHERE", "STATE", "SIZE", "PROGRESS", "LEFT", "AGE")
    rows = [_cells(s, bar=100 <= width < UNBROKEN) for s in standings]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    others = sum(widths[1:]) + GAP * (len(head) - 1)
    widths[0] = min(widths[0], max(len(head[0]), width - others))
    lines = [Text(_joined(head, widths), "bold")]
    for standing, row in zip(standings, rows, strict=True):
        lines.append(_line(standing, row, widths))
        if standing.note:
            style = STYLES.get(standing.state, "") if not standing.active else "dim"
            lines.append(Text(truncate_text(f"  └ {standing.note}", width), style))
    if hidden:
        lines.append(Text(f"and {hidden} more: --all", "dim"))
    return Group(*lines)


def _cells(s: Standing, bar: bool) -> tuple[str, ...]:
    elsewhere = f"on {s.host}" if s.host not in (None, socket.gethostname()) else ""
    where = f"{s.launcher or '–'} {s.job or elsewhere}".rstrip()
    size = f"{s.nodes}×{-(-s.world // s.nodes)}" if s.nodes and s.world else "–"
    left = format_duration(s.eta_s) if s.eta_s is not None else ""
    return (
        s.run,
        where,
        s.state,
        size,
        _progress(s, bar),
        left,
        format_duration(time.time() - s.started),
    )


def _line(standing: Standing, row: Sequence[str], widths: Sequence[int]) -> Text:
    line = Text(_joined(row, widths))
    state = sum(widths[:2]) + 2 * GAP
    line.stylize("bold", 0, widths[0])
    line.stylize(STYLES.get(standing.state, ""), state, state + widths[2])
    return line


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, times to the right."""
    aligned = [
        f"{truncate_text(cell, w):>{w}}"
        if i >= len(cells) - 2
        else f"{truncate_text(cell, w):<{w}}"
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return (" " * GAP).join(aligned).rstrip()


def _progress(s: Standing, bar: bool) -> str:
    if s.step is None and s.total_steps is None:
        return ""
    if not s.total_steps:
        return f"step {s.step}"
    part = min(1.0, (s.step or 0) / s.total_steps)
    full = int(part * _BAR)
    drawn = "━" * full + "─" * (_BAR - full) + " " if bar else ""
    return f"{drawn}{part:4.0%} {s.step or 0}/{s.total_steps}"
