"""`echelon jobs`: the status of runs as a table that fits the terminal, or as JSON."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.text import Text

from echelon.errors import ExitCode
from echelon.notify.follow import FollowedNews
from echelon.runs.curves import RunProgress, read_progress
from echelon.runs.find import find_runs, list_runs
from echelon.runs.listing import RunListing, split_listing
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run
from echelon.runs.status import RunStatus
from echelon.utils.text import format_duration
from echelon.views.table import (
    PIPED_WIDTH,
    STATE_STYLES,
    RowNote,
    Table,
    TableColumn,
    get_width,
)
from echelon.views.terminal import create_console

_RECENT_RUNS = 10
_REFRESH_S = 5.0
"""Slurm's controller answers all its users."""
_BAR_WIDTH = 12


class JobRow(NamedTuple):
    """One run in the table."""

    status: RunStatus
    progress: RunProgress

    def to_dict(self) -> dict[str, Any]:
        """Return the row as `echelon jobs --json` prints it."""
        return asdict(self.status) | asdict(self.progress)


def show_jobs(root: Path, names: Sequence[str], show_all: bool, as_json: bool, watch: bool) -> int:
    """Print the table once or, with ``watch``, again and again until Ctrl-C."""
    console = create_console()
    if not watch or as_json:
        # For programs nothing is left out because it failed early: they may wait for that.
        rows, listing, silence = _collect_rows(root, names, show_all, hides_early=not as_json)
        if as_json:
            print(json.dumps([row.to_dict() for row in rows], indent=2))
        else:
            console.print(_render_table(rows, listing, root, get_width(console)))
        if silence:
            print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
        return ExitCode.OK
    news: dict[str, FollowedNews] = {}
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                rows, listing, _ = _collect_rows(root, names, show_all, hides_early=True)
                live.update(_render_table(rows, listing, root, get_width(console)), refresh=True)
                for status in (row.status for row in rows):
                    folder = status.folder
                    news.setdefault(folder, FollowedNews(Run(Path(folder)))).look(status)
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return ExitCode.OK


def _collect_rows(
    root: Path, names: Sequence[str], show_all: bool, hides_early: bool
) -> tuple[list[JobRow], RunListing, str]:
    """Return the rows, the runs that they were chosen from, and why Slurm did not answer, if it did
    not."""
    wanted = [run for name in names for run in find_runs(name, str(root))]
    records, silence = read_run_records(wanted or list_runs(root))
    shows_each = show_all or bool(names)
    listing = split_listing(records, shows_each, hides_early)
    recent = len(records) if shows_each else _RECENT_RUNS
    shown = [r for i, r in enumerate(listing.shown) if i < recent or r.run_status.is_active]
    rows = [JobRow(record.run_status, read_progress(record)) for record in shown]
    return rows, listing, silence


# --- the table ---


def _render_table(rows: Sequence[JobRow], listing: RunListing, root: Path, width: int) -> Group:
    if rows:
        lines = _build_table(rows, has_bar=100 <= width < PIPED_WIDTH).render(width)
    else:
        lines = [Text(f"no runs in {root.absolute()}; start one with `echelon train`")]
    if older := len(listing.shown) - len(rows):
        lines.append(Text(f"and {older} more: --all", "dim"))
    if hidden := listing.describe_hidden():
        lines.append(Text(hidden, "dim"))
    return Group(*lines)


def _build_table(rows: Sequence[JobRow], has_bar: bool) -> Table:
    statuses = [row.status for row in rows]
    names = [status.run for status in statuses]
    states = [status.state for status in statuses]
    left = [_format_left(row.progress) for row in rows]
    ages = [format_duration(time.time() - status.started) for status in statuses]
    columns = [
        TableColumn("RUN", names, styles=["bold"] * len(rows), min_width=len("RUN")),
        TableColumn("WHERE", [_format_place(status) for status in statuses]),
        TableColumn("STATE", states, styles=[STATE_STYLES.get(state, "") for state in states]),
        TableColumn("SIZE", [_format_size(status) for status in statuses]),
        TableColumn("PROGRESS", [_format_progress(row.progress, has_bar) for row in rows]),
        TableColumn("LEFT", left, is_right_aligned=True),
        TableColumn("AGE", ages, is_right_aligned=True),
    ]
    return Table(columns, [_build_note(status) for status in statuses], is_cut=False)


def _build_note(status: RunStatus) -> RowNote | None:
    style = "dim" if status.is_active else STATE_STYLES.get(status.state, "")
    return RowNote(status.note, style) if status.note else None


def _format_place(status: RunStatus) -> str:
    is_elsewhere = status.host not in (None, socket.gethostname())
    host = f"on {status.host}" if is_elsewhere else ""
    return f"{status.launcher or '–'} {status.job or host}".rstrip()


def _format_size(status: RunStatus) -> str:
    nodes, world = status.nodes, status.world
    return f"{nodes}×{-(-world // nodes)}" if nodes and world else "–"


def _format_left(progress: RunProgress) -> str:
    return "" if progress.eta_s is None else format_duration(progress.eta_s)


def _format_progress(progress: RunProgress, has_bar: bool) -> str:
    step, total = progress.step, progress.total_steps
    if step is None and total is None:
        return ""
    if not total:
        return f"step {step}"
    part = min(1.0, (step or 0) / total)
    full = int(part * _BAR_WIDTH)
    bar = "━" * full + "─" * (_BAR_WIDTH - full) + " " if has_bar else ""
    return f"{bar}{part:4.0%} {step or 0}/{total}"
