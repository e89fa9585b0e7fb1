"""A sweep on the screen: `echelon sweep show` as a table or JSON, and progress while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from echelon.errors import ExitCode
from echelon.sweep.plot import plot_sweep
from echelon.sweep.report import SweepReport, build_report
from echelon.sweep.trial_command import describe_parameters, format_short_value
from echelon.sweep.trial_store import ENDED_STATES, TrialStore, TrialSummary
from echelon.utils.text import truncate_text
from echelon.views.table import STATE_STYLES, Table, TableColumn, get_width
from echelon.views.terminal import create_console

_MAX_TRIALS_SHOWN = 10
_MAX_TRIALS_LIVE = 8


def print_report(
    report: SweepReport, as_json: bool, show_all: bool = False, plot_file: Path | None = None
) -> int:
    """Print a report, and plot it if a file is given; return the exit code."""
    if plot_file is not None:
        plot_sweep(report, plot_file)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return ExitCode.OK
    console = create_console()
    max_trials = None if show_all else _MAX_TRIALS_SHOWN
    console.print(_render_report(report, max_trials, get_width(console)))
    if plot_file is not None:
        print(f"picture     {plot_file}")
    return ExitCode.OK


def _render_report(report: SweepReport, max_trials: int | None, width: int) -> RenderableType:
    parts: list[RenderableType] = [Text(format_headline(report)), Text("")]
    ranked = report.rank_trials()
    shown = ranked[:max_trials]
    numbers = {trial.number for trial in shown}
    shown += [trial for trial in report.open_trials if trial.number not in numbers]
    if shown:
        parts.append(_render_table(report, shown, width))
    numbers |= {trial.number for trial in shown}
    if more := sum(trial.number not in numbers for trial in ranked):
        parts.append(Text(f"… and {more} more: --all", style="dim"))
    failed = [r for r in report.trials if r.state == "failed" and r.cause != report.stop_reason]
    for trial in failed[:3]:
        parts.append(Text(f"trial {trial.name} failed: {trial.cause}", style="red"))
    if len(failed) > 3:
        parts.append(Text(f"… and {len(failed) - 3} more failed", style="red"))
    if report.importance:
        bars = "  ".join(f"{name} {part:.0%}" for name, part in report.importance.items())
        parts += [Text(""), Text(f"importance  {bars}")]
    if report.best is not None:
        family = report.best.run.removesuffix(report.best.name)
        parts += [
            Text(f"best run    echelon show {report.best.run}"),
            Text(f"curves      echelon plot '{family}*'"),
        ]
    return Group(*parts)


def format_headline(report: SweepReport) -> str:
    """Return how far the sweep is, its best trial, and why it ended, if it did."""
    counts = ", ".join(f"{n} {state}" for state, n in report.count_states().items() if n)
    best = report.best
    best_text = (
        f"\nbest {report.metric.name} {best.metric_value:.6g} in trial {best.name}" if best else ""
    )
    stop_text = f"\n{report.stop_reason}" if report.stop_reason else ""
    done = f"{report.ended_count} of {report.run_cap} results"
    return f"sweep {report.sweep.name}: {done} ({counts or 'no trial yet'}){best_text}{stop_text}"


def _render_table(report: SweepReport, trials: Sequence[TrialSummary], width: int) -> Group:
    names = list(dict.fromkeys(name for trial in report.trials for name in trial.parameters))
    values = ["–" if t.metric_value is None else f"{t.metric_value:.6g}" for t in trials]
    evaluations = [str(len(trial.history)) for trial in trials]
    columns = [
        TableColumn("TRIAL", [trial.name for trial in trials], is_right_aligned=True),
        TableColumn(
            "STATE",
            [trial.state for trial in trials],
            styles=[STATE_STYLES.get(trial.state, "yellow") for trial in trials],
        ),
        TableColumn(report.metric.name.upper(), values, is_right_aligned=True),
        TableColumn("EVALS", evaluations, is_right_aligned=True),
        *(_build_parameter_column(name, trials) for name in names),
    ]
    return Group(*Table(columns, header_style="dim").render(width))


def _build_parameter_column(name: str, trials: Sequence[TrialSummary]) -> TableColumn:
    cells = [
        format_short_value(trial.parameters[name]) if name in trial.parameters else ""
        for trial in trials
    ]
    return TableColumn(name, cells, is_right_aligned=True, min_width=1)


class LineProgress:
    """Progress without a terminal: a line whenever a trial starts or ends.

    Nothing is printed of `earlier_trials`, which another command ran, until they change.
    """

    def __init__(self, earlier_trials: Sequence[TrialSummary]) -> None:
        self._known_states = {trial.number: trial.state for trial in earlier_trials}

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def update(self, store: TrialStore) -> None:
        """Print what has changed since the last call."""
        report = build_report(store, with_importance=False)
        best = report.best  # once: it sorts all trials
        for trial in report.trials:
            known = self._known_states.get(trial.number)
            is_new = known is None and trial.state == "waiting"  # its worker is about to take it
            if known == trial.state or is_new:
                continue
            self._known_states[trial.number] = trial.state
            print(_format_line(report, trial, best), file=sys.stderr, flush=True)


def _format_line(report: SweepReport, trial: TrialSummary, best: TrialSummary | None) -> str:
    if trial.state == "waiting":
        return f"trial {trial.name} waits for a worker"
    if trial.state == "running":
        return f"trial {trial.number}: {describe_parameters(trial.parameters)}"
    value = "" if trial.metric_value is None else f", {report.metric.name} {trial.metric_value:.6g}"
    record = f" (best: {best.metric_value:.6g})" if best and best.number != trial.number else ""
    cause = f": {truncate_text(trial.cause, 300)}" if trial.cause else ""
    done = f"{report.ended_count}/{report.run_cap}"
    return f"trial {trial.number} {trial.state}{value}{record}{cause}  {done}"


class LiveProgress:
    """Progress on a terminal: a table of the running trials and the best so far."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._live.__exit__(*raised)

    def update(self, store: TrialStore) -> None:
        """Redraw the table."""
        report = build_report(store, with_importance=False)
        ended = [trial for trial in report.rank_trials() if trial.state in ENDED_STATES]
        shown = [*report.open_trials, *ended[:_MAX_TRIALS_LIVE]]
        table = _render_table(report, shown, self._live.console.width)
        self._live.update(Group(Text(format_headline(report)), table))


def open_progress(earlier_trials: Sequence[TrialSummary]) -> LineProgress | LiveProgress:
    """Return the progress that fits stderr, as a context manager.

    `earlier_trials` are those that the sweep had before its workers were started.
    """
    return LiveProgress() if sys.stderr.isatty() else LineProgress(earlier_trials)
