"""`echelon runs`: runs with their results. What was trained, with which settings, and how good
it is."""

from __future__ import annotations

import fnmatch
import json
import operator
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.curves import RunOverview, RunProgress
from echelon.runs.find import list_runs
from echelon.runs.listing import RunListing, split_listing
from echelon.runs.metrics_file import is_number
from echelon.runs.record import RunRecord, read_run_records
from echelon.utils.text import (
    convert_for_terminal,
    format_duration,
    format_timestamp,
    truncate_text,
)
from echelon.views.run_row import (
    RunRow,
    build_chosen_columns,
    format_digits,
    require_known_names,
)
from echelon.views.run_settings import (
    find_setting_differences,
    format_setting_value,
    format_settings,
    omit_majority_values,
)
from echelon.views.table import (
    STATE_STYLES,
    RowNote,
    Table,
    TableColumn,
    choose_table,
    get_width,
)
from echelon.views.terminal import create_console

JSON_VERSION = 1
"""Of what --json prints."""
_RECENT_RUNS = 20
_CONDITION = re.compile(r"([\w.]+?)(!=|<=|>=|=|<|>)(.*)")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class RunsQuery:
    """Which runs are asked for, in which order, and what of them."""

    show_all: bool = False
    sort: str = "when"
    is_reversed: bool = False
    filters: Sequence[str] = ()
    tags: Sequence[str] = ()
    """A run must have all of them."""
    columns: Sequence[str] = ()
    """Empty: those that `echelon runs` chooses."""


def show_runs(root: Path, query: RunsQuery, as_json: bool) -> int:
    """Print the table, or with ``as_json`` JSON, of the runs in a folder."""
    conditions = [parse_condition(text) for text in query.filters]
    records, silence = read_run_records(list_runs(root, include_broken=True))
    listing = split_listing(records, query.show_all)
    every = [RunRow(record) for record in listing.shown]
    require_known_names(query.columns, every, "--columns")
    rows = _sort_rows(_filter_rows(_select_tagged(every, query.tags), conditions), query.sort)
    rows = rows[::-1] if query.is_reversed else rows
    shown = rows if query.show_all else rows[:_RECENT_RUNS]
    if as_json:
        hidden = {"before_step_1": len(listing.early), "archived": len(listing.archived)}
        print(json.dumps(_to_json_data(shown, query.columns) | {"hidden": hidden}, indent=2))
    else:
        _print_table(shown, len(rows) - len(shown), root, bool(listing.shown), query.columns)
        print_hidden_runs(listing)
    if silence:
        print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
    return ExitCode.OK


def _print_table(
    rows: Sequence[RunRow], hidden: int, root: Path, any_at_all: bool, columns: Sequence[str]
) -> None:
    screen = create_console()
    if rows:
        screen.print(_render_table(rows, hidden, get_width(screen), columns))
    elif any_at_all:
        screen.print(convert_for_terminal(f"no run in {root.absolute()} is such a one"))
    else:
        screen.print(
            convert_for_terminal(f"no runs in {root.absolute()}; start one with `echelon train`")
        )


def print_hidden_runs(listing: RunListing) -> None:
    """Print how many runs a list has left out, and how to see them."""
    if text := listing.describe_hidden():
        create_console().print(Text(convert_for_terminal(text), "dim"))


def _to_json_data(rows: Sequence[RunRow], columns: Sequence[str]) -> dict[str, Any]:
    differ = find_setting_differences([row.record for row in rows])
    return {
        "version": JSON_VERSION,
        "runs": [
            {
                "run": row.record.name,
                "folder": str(row.record.run.folder),
                "experiment": row.record.experiment,
                "state": row.record.state,
                "note": row.record.problem or row.record.run_status.note,
                "step": row.metrics_overview.progress.step,
                "total_steps": row.metrics_overview.progress.total_steps,
                "best": row.metrics_overview.best,
                "best_name": row.metrics_overview.best_name,
                "trained_s": row.metrics_overview.trained_s,
                "started": row.record.run_status.started,
                "tags": list(row.annotations.tags),
                "user_note": row.annotations.note,
                "differs": words,
                **(
                    {"columns": {name: row.values.get(name) for name in columns}} if columns else {}
                ),
            }
            for row, words in zip(rows, differ, strict=True)
        ],
    }


# --- which, and in which order ---


@dataclass(frozen=True)
class FilterCondition:
    """One condition of --filter."""

    key: str
    relation: str
    value: str

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Return whether a run with these values meets it. A run without the key meets only
        `!=`."""
        if self.key not in values:
            return self.relation == "!="
        mine = values[self.key]
        if self.relation in _COMPARISONS:
            return is_number(mine) and _COMPARISONS[self.relation](mine, float(self.value))
        number = _parse_number(self.value)
        same = (
            mine == number
            if is_number(mine) and number is not None
            else self._matches_pattern(mine)
        )
        return same == (self.relation == "=")

    def _matches_pattern(self, mine: Any) -> bool:
        return fnmatch.fnmatchcase(format_setting_value(mine), self.value)


def parse_condition(text: str) -> FilterCondition:
    """Return a condition of --filter. Raises EchelonError for a text that is none."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise EchelonError(
            Fault(
                f"--filter {text}: this is not a condition",
                "write KEY=VALUE, e.g. state=finished, experiment=toy, name='seed-*', 'lr>=0.1'",
            )
        )
    found = FilterCondition(*match.groups())
    if found.relation in _COMPARISONS and _parse_number(found.value) is None:
        raise EchelonError(
            Fault(
                f"--filter {text}: {found.value!r} is not a number, and {found.relation} needs one",
                f"write {found.key}{found.relation}0.1, or {found.key}={found.value or 'VALUE'}",
            )
        )
    return found


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _select_tagged(rows: Sequence[RunRow], tags: Sequence[str]) -> list[RunRow]:
    """Return the rows that have all these tags."""
    return [row for row in rows if not tags or set(tags) <= set(row.annotations.tags)]


def _filter_rows(rows: Sequence[RunRow], conditions: Sequence[FilterCondition]) -> list[RunRow]:
    require_known_names([condition.key for condition in conditions], rows, "--filter")
    return [row for row in rows if all(c.is_met(row.values) for c in conditions)]


def _sort_rows(rows: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Return the rows sorted: newest and best first, everything else ascending, missing values
    last."""
    if sort == "when":
        return list(rows)
    require_known_names([sort], rows, "--sort")
    if sort == "best":
        return sorted(rows, key=_get_best_sort_key)
    return sorted(rows, key=lambda row: row.get_sort_key(sort))


def _get_best_sort_key(row: RunRow) -> tuple[Any, ...]:
    """Sort within an experiment and metric, because values of different metrics cannot be
    compared."""
    value = row.metrics_overview.best
    sign = -1 if row.record.best_is == "max" else 1
    what = (row.record.experiment, row.metrics_overview.best_name)
    return (value is None, *what, 0.0 if value is None else sign * value)


# --- the table ---


def _render_table(rows: Sequence[RunRow], hidden: int, width: int, columns: Sequence[str]) -> Group:
    lines = (
        Table(build_chosen_columns(rows, columns)).render(width)
        if columns
        else _render_default_table(rows, width)
    )
    if hidden:
        lines.append(Text(f"and {hidden} more: --all", "dim"))
    return Group(*lines)


def _render_default_table(rows: Sequence[RunRow], width: int) -> list[Text]:
    differ, usual = omit_majority_values(find_setting_differences([row.record for row in rows]))
    asides = [
        row.record.problem or format_settings(words)
        for row, words in zip(rows, differ, strict=True)
    ]
    tables = (_build_table(rows, asides, *layout) for layout in _LAYOUTS)
    lines = choose_table(tables, width).render(width)
    if format_settings(usual):
        text = truncate_text(f"where not said: {format_settings(usual)}", width)
        lines.append(Text(convert_for_terminal(text), "dim"))
    return lines


_LAYOUTS = [
    (True, True, True),
    (False, True, True),
    (False, False, True),
    (True, True, False),
    (False, True, False),
    (False, False, False),
]
"""With the date or the age; with the experiment even if it is the same everywhere; with settings at
the end of the line or below it. The first that fits is taken."""


def _build_table(
    rows: Sequence[RunRow],
    asides: Sequence[str],
    show_date: bool,
    show_experiment: bool,
    is_inline: bool,
) -> Table:
    """Return the table in one of its layouts. In the narrowest, columns go by their priority; the
    name, by which a run is asked for, stays."""
    records = [row.record for row in rows]
    states = [record.state for record in records]
    columns = [
        TableColumn("RUN", [r.name for r in records], styles=["bold"] * len(rows), min_width=1),
        TableColumn("STATE", states, styles=[STATE_STYLES.get(s, "") for s in states], priority=1),
        TableColumn("EXPERIMENT", [r.experiment for r in records], priority=6),
        TableColumn(
            "STEP", [_format_steps(row.metrics_overview.progress) for row in rows], priority=3
        ),
        TableColumn("BEST", [_format_best(row.metrics_overview) for row in rows], priority=2),
        TableColumn(
            "TIME",
            [_format_duration(row.metrics_overview.trained_s) for row in rows],
            is_right_aligned=True,
            priority=4,
        ),
        TableColumn(
            "WHEN" if show_date else "AGE",
            [_format_start(record, show_date) for record in records],
            is_right_aligned=True,
            priority=5,
        ),
    ]
    if not show_experiment and len({record.experiment for record in records}) == 1:
        columns = [column for column in columns if column.title != "EXPERIMENT"]
    if not is_inline:
        return Table(columns, [RowNote(aside, "cyan") if aside else None for aside in asides])
    if any(asides):
        columns.append(TableColumn("SETTINGS", asides, styles=["cyan"] * len(rows)))
    return Table(columns)


def _format_steps(progress: RunProgress) -> str:
    step, total = progress.step, progress.total_steps
    if step is None:
        return "–"
    return f"{step}" if not total or step >= total else f"{step}/{total}"


def _format_best(overview: RunOverview) -> str:
    return "–" if overview.best is None else f"{overview.best_name} {format_digits(overview.best)}"


def _format_duration(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def _format_start(record: RunRecord, show_date: bool) -> str:
    started = record.run_status.started
    if not show_date:
        return format_duration(time.time() - started)
    return format_timestamp(started)
