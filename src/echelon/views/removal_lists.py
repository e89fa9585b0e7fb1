"""`echelon rm --list` and `echelon archive --list`: what is in the trash, and what is archived."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.errors import ExitCode
from echelon.runs.record import read_run_records
from echelon.runs.removal import TRASH, list_archived_runs, list_trash
from echelon.utils.text import convert_for_terminal, format_bytes, format_timestamp
from echelon.views.table import STATE_STYLES, Table, TableColumn, get_width
from echelon.views.terminal import create_console

_JSON_VERSION = 1


def show_trash(root: Path, as_json: bool) -> int:
    """Print what is in the trash of a folder of runs, the last that was removed first."""
    entries = list_trash(root)
    if as_json:
        rows = [
            {
                "run": entry.folder.name,
                "folder": str(entry.folder.absolute()),
                "removed": entry.removed,
                "size_bytes": entry.size_bytes,
            }
            for entry in entries
        ]
        print(json.dumps({"version": _JSON_VERSION, "trash": rows}, indent=2))
    elif not entries:
        print(f"{root / TRASH} is empty")
    else:
        sizes = [format_bytes(entry.size_bytes) for entry in entries]
        _print_columns(
            TableColumn("RUN", [entry.folder.name for entry in entries], min_width=3),
            TableColumn("SIZE", sizes, is_right_aligned=True),
            TableColumn("REMOVED", [format_timestamp(entry.removed) for entry in entries]),
        )
    return ExitCode.OK


def show_archived_runs(root: Path, as_json: bool) -> int:
    """Print the archived runs of a folder, the newest first."""
    records, _ = read_run_records(list_archived_runs(root))
    if as_json:
        rows = [{"run": record.name, "folder": str(record.run.folder)} for record in records]
        print(json.dumps({"version": _JSON_VERSION, "archived": rows}, indent=2))
    elif not records:
        print(convert_for_terminal(f"no run in {root.absolute()} is archived"))
    else:
        states = [record.state for record in records]
        _print_columns(
            TableColumn("RUN", [record.name for record in records], min_width=3),
            TableColumn("STATE", states, styles=[STATE_STYLES.get(s, "") for s in states]),
            TableColumn("EXPERIMENT", [record.experiment for record in records]),
            TableColumn("WHEN", [format_timestamp(r.run_status.started) for r in records]),
        )
    return ExitCode.OK


def _print_columns(*columns: TableColumn) -> None:
    console = create_console()
    for line in Table(columns).render(get_width(console)):
        console.print(line)
