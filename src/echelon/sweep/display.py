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
from echelon.sweep import trial_command
from echelon.sweep.plot import plot_sweep
from echelon.sweep.report import SweepReport, build_report
from echelon.sweep.trial_store import TrialStore, TrialSummary
from echelon.utils.text import truncate_text
from echelon.views.table_style import PIPED_WIDTH, STATE_STYLES

_MAX_TRIALS_SHOWN = 10
_MAX_TRIALS_LIVE = 8


def print_report(
    report_shown: SweepReport, as_json: bool, show_all: bool = False, plot_file: Path | None = None
) -> int:
    if plot_file is not None:
        plot_sweep(report_shown, plot_file)
    if as_json:
        print(json.dumps(report_shown.to_dict(), indent=2))
        return Exit.OK
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(_render_report(report_shown, None if show_all else _MAX_TRIALS_SHOWN))
    if plot_file is not None:
        print(f"picture     {plot_file}")
    return Exit.OK


def _render_report(report_shown: SweepReport, most: int | None) -> RenderableType:
    parts: list[RenderableType] = [Text(format_headline(report_shown)), Text("")]
    ranked = report_shown.rank_trials()
    shown = [
        *ranked[:most],
        *(result for result in report_shown.open_trials if result not in ranked[:most]),
    ]
    if shown:
        parts.append(_render_table(report_shown, shown))
    if more := len([result for result in ranked if result not in shown]):
        parts.append(Text(f"… and {more} more: --all", style="dim"))
    failed = [
        r
        for r in report_shown.trials
        if r.state == "failed" and r.cause != report_shown.stop_reason
    ]
    for result in failed[:3]:
        parts.append(Text(f"trial {result.name} failed: {result.cause}", style="red"))
    if len(failed) > 3:
        parts.append(Text(f"… and {len(failed) - 3} more failed", style="red"))
    if report_shown.importance:
        bars = "  ".join(f"{name} {part:.0%}" for name, part in report_shown.importance.items())
        parts += [Text(""), Text(f"importance  {bars}")]
    if report_shown.best is not None:
        family = report_shown.best.run.removesuffix(report_shown.best.name)
        parts += [
            Text(f"best run    echelon show {report_shown.best.run}"),
            Text(f"curves      echelon plot '{family}*'"),
        ]
    return Group(*parts)


def format_headline(report_shown: SweepReport) -> str:
    counts = ", ".join(f"{n} {state}" for state, n in report_shown.count_states().items() if n)
    best = report_shown.best
    best_text = (
        f"\nbest {report_shown.metric.name} {best.metric_value:.6g} in trial {best.name}"
        if best
        else ""
    )
    ending = f"\n{report_shown.stop_reason}" if report_shown.stop_reason else ""
    done = f"{report_shown.ended_count} of {report_shown.run_cap} results"
    return (
        f"sweep {report_shown.sweep.name}: {done} ({counts or 'no trial yet'}){best_text}{ending}"
    )


def _render_table(report_shown: SweepReport, results: Sequence[TrialSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = list(
        dict.fromkeys(name for result in report_shown.trials for name in result.parameters)
    )
    table.add_column("TRIAL", justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    table.add_column(report_shown.metric.name.upper(), justify="right", no_wrap=True)
    table.add_column("EVALS", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*_render_row(result, names))
    return table


def _render_row(result: TrialSummary, names: Sequence[str]) -> list[RenderableType]:
    value = "–" if result.metric_value is None else f"{result.metric_value:.6g}"
    cells: list[Any] = [
        trial_command.format_short_value(result.parameters[n]) if n in result.parameters else ""
        for n in names
    ]
    state = Text(result.state, style=STATE_STYLES.get(result.state, "yellow"))
    return [result.name, state, value, str(len(result.history)), *cells]


class LineProgress:
    """Where there is no terminal: a line whenever a trial begins or ends."""

    def __init__(self) -> None:
        self._known_states: dict[int, str] = {}

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def update(self, store: TrialStore) -> None:
        current = build_report(store, importance=False)
        for result in current.trials:
            known = self._known_states.get(result.number)
            begins = known is None and result.state == "waiting"  # its worker is about to have it
            if known == result.state or begins:
                continue
            self._known_states[result.number] = result.state
            print(_format_line(current, result), file=sys.stderr, flush=True)


def _format_line(report_shown: SweepReport, result: TrialSummary) -> str:
    if result.state == "waiting":
        return f"trial {result.name} waits for a worker"
    if result.state == "running":
        return f"trial {result.number}: {trial_command.format_parameters(result.parameters)}"
    value = (
        ""
        if result.metric_value is None
        else f", {report_shown.metric.name} {result.metric_value:.6g}"
    )
    best = report_shown.best
    record = f" (best: {best.metric_value:.6g})" if best and best.number != result.number else ""
    cause = f": {truncate_text(result.cause, 300)}" if result.cause else ""
    done = f"{report_shown.ended_count}/{report_shown.run_cap}"
    return f"trial {result.number} {result.state}{value}{record}{cause}  {done}"


class LiveProgress:
    """On a terminal: the trials at work and the best so far."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._live.__exit__(*raised)

    def update(self, store: TrialStore) -> None:
        current = build_report(store, importance=False)
        best = [result for result in current.rank_trials() if result not in current.open_trials][
            :_MAX_TRIALS_LIVE
        ]
        self._live.update(
            Group(
                Text(format_headline(current)),
                _render_table(current, [*current.open_trials, *best]),
            )
        )


def open_progress() -> LineProgress | LiveProgress:
    return LiveProgress() if sys.stderr.isatty() else LineProgress()
