"""`echelon cost` and the line of it in `echelon show`: hours, shares, energy and price."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from echelon.errors import ExitCode
from echelon.runs.cost import (
    ACCOUNTS,
    HISTORY,
    IDLE,
    LOST,
    OTHER,
    STEPPING,
    USES,
    WAITING,
    RunCost,
    RunUse,
    TimeWindow,
    add_up,
    compute_costs,
    find_first_start,
)
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run
from echelon.runs.slurm_accounts import SlurmAccounts, query_accounts
from echelon.tracking.summary import format_share
from echelon.views.table import Table, TableColumn, get_width
from echelon.views.terminal import create_console

JSON_VERSION = 1
"""Of what --json prints."""
GROUPINGS = ("run", "sweep", "user", "month")
_JOULES_PER_KWH = 3.6e6
_TITLES = {
    STEPPING: "STEPPING",
    WAITING: "WAITING",
    LOST: "LOST",
    IDLE: "IDLE",
    OTHER: "PROGRAMS",
}
_SOURCES = {HISTORY: "history", ACCOUNTS: "Slurm"}


class Price(NamedTuple):
    """What an hour of a GPU costs."""

    per_gpu_hour: float
    currency: str = ""

    def format_cost(self, cost: RunCost) -> str:
        """Return what the GPU-hours cost."""
        return f"{cost.gpu_hours * self.per_gpu_hour:,.2f} {self.currency}".rstrip()


class CostQuery(NamedTuple):
    """What was asked for."""

    runs: Sequence[Run]
    window: TimeWindow
    by: str
    """One of GROUPINGS."""
    user: str | None
    price: Price | None
    uses_accounts: bool
    find_sweep: Callable[[Run], str]
    """The name of the sweep that a run is a trial of, or an empty string."""


class CostRow(NamedTuple):
    """One line of the table."""

    name: str
    user: str
    cost: RunCost


def show_costs(query: CostQuery, as_json: bool) -> int:
    """Print what runs have cost; returns the exit code."""
    records, silence = read_run_records(query.runs)
    if silence:
        print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
    now = time.time()
    read = (
        RunUse.read(record.run, record.run_status.state in ("running", "starting"), now)
        for record in records
    )
    uses = [use for use in read if query.user in (None, use.user)]
    jobs = list(dict.fromkeys(job for use in uses for job in use.jobs))
    accounts = query_accounts(jobs) if jobs and query.uses_accounts else SlurmAccounts({})
    rows = list(_iterate_rows(query, uses, accounts))
    total = add_up(
        cost for cost in compute_costs(uses, query.window, accounts.jobs) if cost.has_cost
    )
    if as_json:
        print(json.dumps(_to_json_data(query, rows, total, accounts), indent=2))
        return ExitCode.OK
    console = create_console()
    if not rows:
        console.print("no run has cost anything, of those that were asked for")
        return ExitCode.OK
    for line in _render_table(query, rows, total).render(get_width(console)):
        console.print(line)
    for note in _list_notes(total, accounts):
        console.print(Text(note, "dim"))
    return ExitCode.OK


def _iterate_rows(
    query: CostQuery, uses: Sequence[RunUse], accounts: SlurmAccounts
) -> Iterator[CostRow]:
    """Yield the lines, the ones that cost most first; months in their order."""
    if query.by == "month":
        for name, month in _iterate_months(query.window, find_first_start(uses)):
            cost = add_up(c for c in compute_costs(uses, month, accounts.jobs) if c.has_cost)
            if cost.has_cost:
                yield CostRow(name, "", cost)
        return
    costs = compute_costs(uses, query.window, accounts.jobs)
    groups: dict[str, RunCost] = {}
    users: dict[str, str] = {}
    for use, cost in zip(uses, costs, strict=True):
        if not cost.has_cost:
            continue
        sweep = query.find_sweep(use.run) if query.by == "sweep" else ""
        name = use.user if query.by == "user" else sweep or use.run.name
        groups.setdefault(name, RunCost()).add(cost)
        users[name] = use.user
    rows = [
        CostRow(name, "" if query.by == "user" else users[name], cost)
        for name, cost in groups.items()
    ]
    yield from sorted(rows, key=lambda row: (-row.cost.gpu_hours, -row.cost.cpu_hours, row.name))


def _iterate_months(
    window: TimeWindow, first_start: float | None
) -> Iterator[tuple[str, TimeWindow]]:
    """Yield the months of the local calendar within a window, from the first start until now."""
    if first_start is None:
        return
    year, month = time.localtime(max(window.since, first_start))[:2]
    until = min(window.until, time.time() + 1)
    while (start := get_month_start(year, month)) < until:
        year, month, name = year + month // 12, month % 12 + 1, f"{year}-{month:02}"
        end = get_month_start(year, month)
        yield name, TimeWindow(max(start, window.since), min(end, window.until))


def get_month_start(year: int, month: int) -> float:
    """Return when a month begins in the time zone of this process, in seconds since 1970."""
    return time.mktime((year, month, 1, 0, 0, 0, 0, 0, -1))


# --- the table ---


def _render_table(query: CostQuery, rows: Sequence[CostRow], total: RunCost) -> Table:
    shown = [*rows, CostRow("total", "", total)] if len(rows) > 1 else list(rows)
    costs = [row.cost for row in shown]
    names = [row.name + (" …" if row.cost.is_active else "") for row in shown]
    styles = [*["bold"] * len(rows), *["bold"] * (len(shown) - len(rows))]
    columns = [TableColumn(query.by.upper(), names, styles=styles, min_width=8)]
    if query.by in ("sweep", "user", "month"):
        columns.append(_make_column("RUNS", [f"{cost.runs:,}" for cost in costs], 3))
    if query.by in ("run", "sweep") and len({row.user for row in rows}) > 1:
        columns.append(TableColumn("USER", [row.user for row in shown], priority=2))
    if total.gpu_hours:
        columns.append(_make_column("GPU-HOURS", [_format_hours(c.gpu_hours) for c in costs]))
    if total.cpu_hours or not total.gpu_hours:
        columns.append(_make_column("CPU-HOURS", [_format_hours(c.cpu_hours) for c in costs]))
    shares = [cost.compute_shares() for cost in costs]
    for use in USES:
        if any(share[use] for share in shares):
            cells = [format_share(share[use]) if share[use] else "–" for share in shares]
            columns.append(_make_column(_TITLES[use], cells, 1))
    if total.queue_s:
        cells = [_format_hours(cost.queue_s / 3600) for cost in costs]
        columns.append(_make_column("QUEUE-HOURS", cells, 4))
    if total.energy_j is not None:
        columns.append(_make_column("KWH", [_format_energy(cost) for cost in costs], 2))
    if query.price is not None and total.gpu_hours:
        columns.append(_make_column("PRICE", [query.price.format_cost(c) for c in costs]))
    if total.sources != {HISTORY}:
        columns.append(TableColumn("FROM", [_format_sources(c) for c in costs], priority=5))
    return Table(columns)


def _make_column(title: str, cells: list[str], priority: int = 0) -> TableColumn:
    return TableColumn(title, cells, is_right_aligned=True, priority=priority)


def _list_notes(total: RunCost, accounts: SlurmAccounts) -> Iterator[str]:
    """Yield what a reader of the table has to know."""
    if accounts.error:
        yield f"by histories of runs: Slurm's accounting does not answer ({accounts.error})"
    elif total.sources == {HISTORY}:
        yield "by histories of runs"
    if total.is_estimate:
        yield "older starts did not record their devices, which are taken from their settings"
    if total.is_active:
        yield "… goes on"


def _format_sources(cost: RunCost) -> str:
    return ", ".join(_SOURCES[source] for source in sorted(cost.sources))


def _format_hours(hours: float) -> str:
    if not hours:
        return "–"
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.3g}"


def _format_energy(cost: RunCost) -> str:
    return "–" if cost.energy_j is None else f"{cost.energy_j / _JOULES_PER_KWH:.3g}"


# --- one line, and JSON ---


def format_run_cost(cost: RunCost) -> str:
    """Return what one run has cost in a line; nothing where it has not."""
    if not cost.has_cost:
        return ""
    found = {"GPU-hours": cost.gpu_hours, "CPU-hours": cost.cpu_hours}
    words = [f"{_format_hours(hours)} {name}" for name, hours in found.items() if hours]
    shares = cost.compute_shares()
    names = {STEPPING: "stepping", WAITING: "waiting", LOST: "lost", IDLE: "idle"}
    words += [f"{format_share(shares[use])} {n}" for use, n in names.items() if shares[use]]
    if cost.energy_j is not None:
        words.append(f"{_format_energy(cost)} kWh")
    return ", ".join(words)


def cost_to_json(cost: RunCost, price: Price | None = None) -> dict[str, Any]:
    """Return the numbers of a cost, as --json prints them."""
    seconds = {use: (cost.gpu_s[use], cost.cpu_s[use]) for use in USES}
    return {
        "gpu_hours": cost.gpu_hours,
        "cpu_hours": cost.cpu_hours,
        "gpu_hours_by_use": {use: gpu_s / 3600 for use, (gpu_s, _) in seconds.items()},
        "cpu_hours_by_use": {use: cpu_s / 3600 for use, (_, cpu_s) in seconds.items()},
        "queue_hours": cost.queue_s / 3600,
        "energy_kwh": None if cost.energy_j is None else cost.energy_j / _JOULES_PER_KWH,
        "price": None if price is None else cost.gpu_hours * price.per_gpu_hour,
        "sources": sorted(cost.sources),
        "runs": cost.runs,
        "active": cost.is_active,
        "estimate": cost.is_estimate,
    }


def _to_json_data(
    query: CostQuery, rows: Sequence[CostRow], total: RunCost, accounts: SlurmAccounts
) -> dict[str, Any]:
    since, until = query.window
    price = query.price
    return {
        "version": JSON_VERSION,
        "since": since or None,
        "until": None if until == TimeWindow().until else until,
        "by": query.by,
        "price_per_gpu_hour": None if price is None else price.per_gpu_hour,
        "currency": None if price is None else price.currency or None,
        "slurm_error": accounts.error or None,
        "rows": [
            {query.by: row.name}
            | ({"user": row.user} if query.by in ("run", "sweep") else {})
            | cost_to_json(row.cost, price)
            for row in rows
        ],
        "total": cost_to_json(total, price),
    }
