"""`echelon sweep show`: a sweep as a table that fits the screen, or as JSON; and while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echelon.errors import Exit
from echelon.jobs.table import STYLES, UNBROKEN
from echelon.sweep import given
from echelon.sweep.book import Book, Result
from echelon.sweep.plot import plot
from echelon.sweep.report import Report, report
from echelon.utils.text import truncate_text

_SHOWN = 10
_LIVE = 8


def show(
    told: Report, as_json: bool, all_of_them: bool = False, picture: Path | None = None
) -> int:
    if picture is not None:
        plot(told, picture)
    if as_json:
        print(json.dumps(told.to_dict(), indent=2))
        return Exit.OK
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = UNBROKEN
    console.print(_whole(told, None if all_of_them else _SHOWN))
    if picture is not None:
        print(f"picture     {picture}")
    return Exit.OK


def _whole(told: Report, most: int | None) -> RenderableType:
    parts: list[RenderableType] = [Text(headline(told)), Text("")]
    ranked = told.ranked()
    shown = [*ranked[:most], *(result for result in told.open if result not in ranked[:most])]
    if shown:
        parts.append(_table(told, shown))
    if more := len([result for result in ranked if result not in shown]):
        parts.append(Text(f"… and {more} more: --all", style="dim"))
    failed = [r for r in told.results if r.state == "failed" and r.cause != told.ending]
    for result in failed[:3]:
        parts.append(Text(f"trial {result.name} failed: {result.cause}", style="red"))
    if len(failed) > 3:
        parts.append(Text(f"… and {len(failed) - 3} more failed", style="red"))
    if told.importance:
        bars = "  ".join(f"{name} {part:.0%}" for name, part in told.importance.items())
        parts += [Text(""), Text(f"importance  {bars}")]
    if told.best is not None:
        family = told.best.run.removesuffix(told.best.name)
        parts += [
            Text(f"best run    echelon show {told.best.run}"),
            Text(f"curves      echelon plot '{family}*'"),
        ]
    return Group(*parts)


def headline(told: Report) -> str:
    counts = ", ".join(f"{n} {state}" for state, n in told.counts().items() if n)
    best = told.best
    said = f"\nbest {told.metric.name} {best.value:.6g} in trial {best.name}" if best else ""
    ending = f"\n{told.ending}" if told.ending else ""
    done = f"{told.done} of {told.cap} results"
    return f"sweep {told.sweep.name}: {done} ({counts or 'no trial yet'}){said}{ending}"


def _table(told: Report, results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = list(dict.fromkeys(name for result in told.results for name in result.values))
    table.add_column("TRIAL", justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    table.add_column(told.metric.name.upper(), justify="right", no_wrap=True)
    table.add_column("EVALS", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*_row(result, names))
    return table


def _row(result: Result, names: Sequence[str]) -> list[RenderableType]:
    value = "–" if result.value is None else f"{result.value:.6g}"
    cells: list[Any] = [given.shown(result.values[n]) if n in result.values else "" for n in names]
    state = Text(result.state, style=STYLES.get(result.state, "yellow"))
    return [result.name, state, value, str(len(result.history)), *cells]


class Lines:
    """Where there is no terminal: a line whenever a trial begins or ends."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def tell(self, book: Book) -> None:
        told = report(book, importance=False)
        for result in told.results:
            known = self._known.get(result.number)
            begins = known is None and result.state == "waiting"  # its worker is about to have it
            if known == result.state or begins:
                continue
            self._known[result.number] = result.state
            print(_line(told, result), file=sys.stderr, flush=True)


def _line(told: Report, result: Result) -> str:
    if result.state == "waiting":
        return f"trial {result.name} waits for a worker"
    if result.state == "running":
        return f"trial {result.number}: {given.listed(result.values)}"
    value = "" if result.value is None else f", {told.metric.name} {result.value:.6g}"
    best = told.best
    record = f" (best: {best.value:.6g})" if best and best.number != result.number else ""
    cause = f": {truncate_text(result.cause, 300)}" if result.cause else ""
    done = f"{told.done}/{told.cap}"
    return f"trial {result.number} {result.state}{value}{record}{cause}  {done}"


class Screen:
    """On a terminal: the trials at work and the best so far."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)

    def __enter__(self) -> Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._live.__exit__(*raised)

    def tell(self, book: Book) -> None:
        told = report(book, importance=False)
        best = [result for result in told.ranked() if result not in told.open][:_LIVE]
        self._live.update(Group(Text(headline(told)), _table(told, [*told.open, *best])))


def watching() -> Lines | Screen:
    return Screen() if sys.stderr.isatty() else Lines()
