"""`echelon runs`: the notebook of results. What was trained, with what, and what came of it."""

from __future__ import annotations

import fnmatch
import json
import operator
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from echelon.errors import EchelonError, Exit, Fault, nearest
from echelon.jobs.table import GAP, STYLES, columns
from echelon.utils.text import (
    convert_for_terminal,
    format_duration,
    format_timestamp,
    truncate_text,
)
from echelon.view.metrics import Glance, glance
from echelon.view.record import Record, folders, is_number, records
from echelon.view.settings import compact, differing, settings, spelled, text
from echelon.view.terminal import console

VERSION = 1
"""Of what --json prints."""
_RECENT = 20
_CONDITION = re.compile(r"([\w.]+?)(!=|<=|>=|=|<|>)(.*)")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Row:
    record: Record

    @cached_property
    def glance(self) -> Glance:
        """Costs a look into the metrics, so it is taken only of rows where it is asked for."""
        return glance(self.record)

    @property
    def known(self) -> dict[str, Any]:
        """By what a run can be sorted and filtered."""
        seen = self.glance
        words = {"name": self.record.name, "experiment": self.record.experiment}
        words |= {"state": self.record.state}
        numbers = {"step": seen.step, "best": seen.best, "time": seen.worked_s}
        return settings(self.record) | words | numbers | {"when": self.record.standing.started}


def show_runs(
    root: Path, everything: bool, as_json: bool, sort: str, reverse: bool, filters: Sequence[str]
) -> int:
    conditions = [_condition(words) for words in filters]
    found, silence = records(folders(root))
    rows = _sorted(_kept([Row(record) for record in found], conditions), sort)
    rows = rows[::-1] if reverse else rows
    shown = rows if everything else rows[:_RECENT]
    if as_json:
        print(json.dumps(_data(shown), indent=2))
    else:
        _print(shown, len(rows) - len(shown), root, bool(found))
    if silence:
        print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
    return Exit.OK


def _print(rows: Sequence[Row], hidden: int, root: Path, any_at_all: bool) -> None:
    screen = console()
    if rows:
        screen.print(_table(rows, hidden, columns(screen)))
    elif any_at_all:
        screen.print(convert_for_terminal(f"no run in {root.absolute()} is such a one"))
    else:
        screen.print(
            convert_for_terminal(f"no runs in {root.absolute()}; start one with `echelon train`")
        )


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    differ = differing([row.record for row in rows])
    return {
        "version": VERSION,
        "runs": [
            {
                "run": row.record.name,
                "folder": str(row.record.run.folder),
                "experiment": row.record.experiment,
                "state": row.record.state,
                "note": row.record.broken or row.record.standing.note,
                "step": row.glance.step,
                "total_steps": row.record.count("total_steps"),
                "best": row.glance.best,
                "best_name": row.glance.best_name,
                "trained_s": row.glance.worked_s,
                "started": row.record.standing.started,
                "differs": words,
            }
            for row, words in zip(rows, differ, strict=True)
        ],
    }


# --- which, and in which order ---


@dataclass(frozen=True)
class Condition:
    key: str
    relation: str
    value: str

    def holds(self, known: dict[str, Any]) -> bool:
        if self.key not in known:
            return self.relation == "!="
        mine = known[self.key]
        if self.relation in _ORDERS:
            return is_number(mine) and _ORDERS[self.relation](mine, float(self.value))
        number = _number(self.value)
        same = mine == number if is_number(mine) and number is not None else self._matches(mine)
        return same == (self.relation == "=")

    def _matches(self, mine: Any) -> bool:
        return fnmatch.fnmatchcase(text(mine), self.value)


def _condition(words: str) -> Condition:
    match = _CONDITION.fullmatch(words)
    if match is None:
        raise EchelonError(
            Fault(
                f"--filter {words}: this is no condition",
                "write KEY=VALUE, e.g. state=finished, experiment=toy, name='seed-*', 'lr>=0.1'",
            )
        )
    found = Condition(*match.groups())
    if found.relation in _ORDERS and _number(found.value) is None:
        raise EchelonError(
            Fault(
                f"--filter {words}: {found.value!r} is no number, and {found.relation} needs one",
                f"write {found.key}{found.relation}0.1, or {found.key}={found.value or 'VALUE'}",
            )
        )
    return found


def _number(words: str) -> float | None:
    try:
        return float(words)
    except ValueError:
        return None


def _kept(rows: Sequence[Row], conditions: Sequence[Condition]) -> list[Row]:
    for condition in conditions:
        _require_known(condition.key, rows, "--filter")
    return [row for row in rows if all(c.holds(row.known) for c in conditions)]


def _require_known(key: str, rows: Sequence[Row], option: str) -> None:
    known = {name for row in rows for name in row.known}
    if rows and key not in known:
        likely = {name for name in known if not name.startswith(("launch.", "run.", "track."))}
        raise EchelonError(Fault(f"{option}: no run has {key!r}", nearest(key, likely)))


def _sorted(rows: Sequence[Row], sort: str) -> list[Row]:
    """The newest and the best first, everything else from small to large, what is missing last."""
    if sort == "when":
        return list(rows)
    _require_known(sort, rows, "--sort")
    if sort == "best":
        return sorted(rows, key=_by_best)
    return sorted(rows, key=lambda row: _rank(row.known.get(sort)))


def _by_best(row: Row) -> tuple[Any, ...]:
    """Values of different metrics say nothing about each other."""
    value = row.glance.best
    sign = -1 if row.record.best_is == "max" else 1
    what = (row.record.experiment, row.glance.best_name)
    return (value is None, *what, 0.0 if value is None else sign * value)


def _rank(value: Any) -> tuple[int, float, str]:
    if is_number(value):
        return 0, value, ""
    return (2, 0.0, "") if value is None else (1, 0.0, text(value))


# --- the table ---


def _table(rows: Sequence[Row], hidden: int, width: int) -> Group:
    differ, usual = compact(differing([row.record for row in rows]))
    asides = [row.record.broken or spelled(words) for row, words in zip(rows, differ, strict=True)]
    inline = max(map(len, [*asides, "SETTINGS"])) if any(asides) else 0
    for dated, named, beside in _LAYOUTS:
        table = _columns(rows, dated, named or not _one_experiment(rows))
        if _taken(table) + beside * (inline + GAP) <= width:
            break
    else:
        table = _fitting(table, width)
    widths = [min(max(map(len, column)), width) for column in table]
    lines = _lines(rows, table, widths, ["SETTINGS" * bool(inline), *asides], beside, width)
    if spelled(usual):
        lines.append(
            Text(
                convert_for_terminal(truncate_text(f"where not said: {spelled(usual)}", width)),
                "dim",
            )
        )
    if hidden:
        lines.append(Text(f"and {hidden} more: --all", "dim"))
    return Group(*lines)


_LAYOUTS = [
    (True, True, True),
    (False, True, True),
    (False, False, True),
    (True, True, False),
    (False, True, False),
    (False, False, False),
]
"""With the date or the age; with a column that is the same everywhere; with settings at the end of
the line or below it. The first that fits is taken."""


_KEPT = ("STATE", "BEST", "STEP", "TIME", "AGE", "EXPERIMENT")
"""Beside the name, by which a run is asked for: what there is room for, in this order."""


def _fitting(table: Sequence[list[str]], width: int) -> list[list[str]]:
    kept = {"RUN"}
    for name in _KEPT:
        if _taken([column for column in table if column[0] in {*kept, name}]) <= width:
            kept.add(name)
    return [column for column in table if column[0] in kept]


def _taken(table: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in table) + GAP * (len(table) - 1)


def _one_experiment(rows: Sequence[Row]) -> bool:
    return len({row.record.experiment for row in rows}) == 1


def _columns(rows: Sequence[Row], dated: bool, named: bool) -> list[list[str]]:
    found = [
        ["RUN", *(row.record.name for row in rows)],
        ["STATE", *(row.record.state for row in rows)],
        ["EXPERIMENT", *(row.record.experiment for row in rows)],
        ["STEP", *(_steps(row) for row in rows)],
        ["BEST", *(_best(row.glance) for row in rows)],
        ["TIME", *(_took(row.glance.worked_s) for row in rows)],
        ["WHEN" if dated else "AGE", *(_when(row.record, dated) for row in rows)],
    ]
    return found if named else found[:2] + found[3:]


def _lines(
    rows: Sequence[Row],
    table: Sequence[Sequence[str]],
    widths: Sequence[int],
    asides: Sequence[str],
    beside: bool,
    width: int,
) -> list[Text]:
    lines = []
    heads = [column[0] for column in table]
    for number, (cells, aside) in enumerate(zip(zip(*table, strict=True), asides, strict=True)):
        row = _joined(heads, cells, widths)
        line = Text(
            convert_for_terminal(row if beside else truncate_text(row, width)),
            "bold" if number == 0 else "",
        )
        if number:
            line.stylize("bold", 0, widths[0])
        if number and "STATE" in heads:
            state = widths[0] + GAP
            line.stylize(STYLES.get(cells[1], ""), state, state + widths[1])
        if beside and aside:
            line.append(" " * GAP + convert_for_terminal(aside), "cyan" if number else "")
        line.rstrip()
        lines.append(line)
        if not beside and number and aside:
            lines.append(Text(convert_for_terminal(truncate_text(f"  └ {aside}", width)), "cyan"))
    return lines


def _joined(heads: Sequence[str], cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, times to the right."""
    aligned = [
        f"{truncate_text(cell, w):>{w}}"
        if head in ("TIME", "WHEN", "AGE")
        else f"{truncate_text(cell, w):<{w}}"
        for head, cell, w in zip(heads, cells, widths, strict=True)
    ]
    return (" " * GAP).join(aligned)


def _steps(row: Row) -> str:
    step, total = row.glance.step, row.record.count("total_steps")
    if step is None:
        return "–"
    return f"{step}" if not total or step >= total else f"{step}/{total}"


def _best(seen: Glance) -> str:
    return "–" if seen.best is None else f"{seen.best_name} {digits(seen.best)}"


def digits(value: float) -> str:
    """Four that count, so that values below each other can be compared."""
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= abs(value) < 1e5 or not value else f"{value:.3g}"


def _took(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(seconds)


def _when(record: Record, dated: bool) -> str:
    started = record.standing.started
    if not dated:
        return format_duration(time.time() - started)
    return format_timestamp(started)
