"""`echelon show RUN`: what it was, its results, its curves, and what to type next."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from echelon.config.schema import find_script
from echelon.errors import ExitCode
from echelon.runs.accounting import RunAccounting, account_for_run
from echelon.runs.annotations import Annotations, read_annotations
from echelon.runs.cost import RunCost, RunUse, TimeWindow, compute_costs
from echelon.runs.curves import (
    AxisPoints,
    Curve,
    RunMetrics,
    choose_best_direction,
    load_metrics,
    read_overview,
    read_record_history,
    sort_metric_names,
)
from echelon.runs.find import find_run_including_broken
from echelon.runs.history import RunHistory
from echelon.runs.metrics_file import SPEED_METRICS, is_number, read_recent_metrics
from echelon.runs.origin import read_copy_state, read_origin
from echelon.runs.record import RunRecord, read_run_records
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import SlurmQueueAnswer
from echelon.snapshot.layout import find_best, list_snapshots, parse_step
from echelon.tracking.summary import (
    format_effective_time,
    format_run_argument,
    shorten_path,
    suggest_resume,
)
from echelon.tracking.tracker import format_speed, format_three_digits
from echelon.utils.text import (
    can_print_unicode,
    convert_for_terminal,
    format_duration,
    format_time_ago,
    format_timestamp,
    truncate_text,
)
from echelon.views.cost_table import cost_to_json, format_run_cost
from echelon.views.run_losses import (
    accounting_to_json,
    format_hosts_at_fault,
    format_kept_machines,
    format_left_nodes,
    format_left_out_machines,
    format_slow_ranks,
    render_losses,
)
from echelon.views.run_phases import phases_to_json, render_phases
from echelon.views.run_row import format_digits
from echelon.views.run_settings import find_non_defaults, format_settings
from echelon.views.table import (
    PIPED_WIDTH,
    STATE_STYLES,
    Table,
    TableColumn,
    choose_table,
    get_width,
)
from echelon.views.terminal import create_console
from echelon.views.text_chart import ASCII, BRAILLE, TextPanel, draw_panel, join_side_by_side

JSON_VERSION = 1
"""Of what --json prints."""
_MIN_PANEL_WIDTH = 38
"""Columns of a panel at the least."""
_MAX_PANEL_WIDTH = 64
_PANEL_HEIGHT = 9
_MAX_PANELS = 6
_PIPED_CHART_WIDTH = 80
_INDENT = 12
_RECENT_SAMPLES = 8


@dataclass(frozen=True)
class RunDetails:
    """Everything that is shown of one run."""

    record: RunRecord
    metrics: RunMetrics
    step: int | None
    trained_s: float | None
    annotations: Annotations
    accounting: RunAccounting | None
    """None where nothing is known of its time: a program, a run without a history."""

    @classmethod
    def read(cls, run: Run) -> RunDetails:
        """Read the folder of a run and its metrics, in bounded memory, and ask Slurm if it runs
        there.

        If Slurm does not answer, a warning is printed and the status is what the folder says.
        """
        [record], silence = read_run_records([run])
        if silence:
            print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
        overview = read_overview(record)
        step, annotations = overview.progress.step, read_annotations(run)
        metrics, logged_step = load_metrics(record), overview.summary.last_training_step
        accounting = account_for_run(
            metrics.history, None if logged_step is None else int(logged_step)
        )
        return cls(record, metrics, step, overview.trained_s, annotations, accounting)

    @classmethod
    def read_summarized(
        cls, run: Run, ask_slurm: Callable[[Sequence[str]], SlurmQueueAnswer]
    ) -> RunDetails:
        """As read(), but without reading all of the metrics: each has its best and its last value,
        as they are summed up. It takes no longer for a long run, and Slurm is asked as given."""
        [record], _ = read_run_records([run], ask_slurm)
        overview, history = read_overview(record), read_record_history(record)
        curves = {}
        summaries = overview.summary.metrics
        for name in sort_metric_names(summaries, record.best_name):
            each = summaries[name]
            best_is = choose_best_direction(name, record)
            best, best_step = each.get_best(best_is), each.min_step
            if best_is == "max":
                best_step = each.max_step
            values, steps = [best, each.last], [best_step, each.last_step]
            curves[name] = Curve(name, best_is, steps, values, values, each.count)
        not_finite = overview.summary.not_finite
        metrics = RunMetrics(curves, not_finite, AxisPoints([], [], []), None, None, history)
        logged_step = overview.summary.last_training_step
        accounting = account_for_run(history, None if logged_step is None else int(logged_step))
        annotations = read_annotations(run)
        step = overview.progress.step
        return cls(record, metrics, step, overview.trained_s, annotations, accounting)


def show_run(where: str, root: str, as_json: bool) -> int:
    """Print one run, or with ``as_json`` JSON."""
    details = RunDetails.read(find_run_including_broken(where, root))
    if as_json:
        print(json.dumps(_to_json_data(details), indent=2))
        return ExitCode.OK
    screen = create_console()
    width = min(get_width(screen), 200)
    chart_width = _PIPED_CHART_WIDTH if get_width(screen) == PIPED_WIDTH else width
    print_details(details, screen, width, list(_render_curves(details, chart_width)))
    return ExitCode.OK


def print_details(
    details: RunDetails, screen: Console, width: int, curves: Sequence[str] = ()
) -> None:
    """Print one run: what it was, its results and, below them, the lines of its curves."""
    _print_header(details, screen, width)
    screen.print()
    for table in (
        render_phases(details.metrics.history, width),
        render_losses(details.accounting, width),
    ):
        for row in (*table, Text("")) if table else ():
            screen.print(row)
    for result in _render_results(details.metrics, width):
        screen.print(result)
    for line in curves:
        screen.print(line)
    screen.print()
    for name, value in (_list_locations(details.record) | _suggest_commands(details)).items():
        _print_row(screen, name, value, width)


def _to_json_data(details: RunDetails) -> dict[str, Any]:
    curves = details.metrics.curves
    cost = {"cost": cost_to_json(_compute_cost(details.record))}
    return (
        cost
        | describe_run(
            details.record,
            details.metrics.history,
            details.accounting,
            details.annotations,
            details.step,
            details.trained_s,
        )
        | {"metrics": {name: _summarize_curve(curve) for name, curve in curves.items()}}
    )


def describe_run(
    record: RunRecord,
    history: RunHistory,
    accounting: RunAccounting | None,
    annotations: Annotations,
    step: int | None,
    trained_s: float | None,
) -> dict[str, Any]:
    """Return what `echelon show --json` prints of a run but its metrics, which may take long to
    read."""
    status = record.run_status
    return {
        "version": JSON_VERSION,
        "run": record.name,
        "folder": str(record.run.folder),
        "experiment": record.experiment,
        "entry": record.entry_point or None,
        "program": record.program_argv or None,
        "state": record.state,
        "note": record.problem or status.note,
        "started": status.started,
        "trained_s": trained_s,
        **{key: getattr(status, key) for key in ("launcher", "job", "host", "nodes", "world")},
        "step": step,
        "total_steps": record.facts.total_steps,
        "settings": find_non_defaults(record),
        "tags": list(annotations.tags),
        "user_note": annotations.note,
        "phases": phases_to_json(history),
        "accounting": accounting_to_json(accounting, history),
        "snapshots": [
            {"step": step, "best": is_best, "folder": str(folder)}
            for step, is_best, folder in list_run_snapshots(record.run)
        ],
        "mirror": _get_mirror(record),
        "files": {name: str(path) for name, path in _list_files(record.run).items()},
    }


def _compute_cost(record: RunRecord) -> RunCost:
    """Return what the run has cost by its own history: Slurm's accounts are asked by `cost`."""
    use = RunUse.read(record.run, record.run_status.state in ("running", "starting"))
    return compute_costs([use], TimeWindow())[0]


def _summarize_curve(curve: Curve) -> dict[str, Any]:
    at = curve.best_index
    return {
        "is": curve.best_is,
        "best": curve.values[at],
        "best_step": curve.steps[at],
        "last": curve.values[-1],
        "last_step": curve.steps[-1],
        "count": curve.count,
    }


# --- the head ---


def _print_header(details: RunDetails, screen: Console, width: int) -> None:
    record = details.record
    head = Text(convert_for_terminal(record.name), "bold")
    head.append("  ").append(record.state, STATE_STYLES.get(record.state, ""))
    screen.print(head)
    note = record.problem or record.run_status.note
    rows = {
        "why" if not record.run_status.is_active else "note": note,
        "experiment": _format_experiment(record),
        "when": _format_times(details),
        "where": _format_launcher(record),
        "cluster": _format_origin(record.run),
        "progress": _format_progress(details),
        "speed": _format_speed_row(details),
        "effective": format_effective_time(details.accounting),
        "cost": format_run_cost(_compute_cost(details.record)),
        "at fault": format_hosts_at_fault(details.accounting),
        "left": format_left_nodes(details.metrics.history),
        "slow": format_slow_ranks(details.metrics.history),
        "left out": format_left_out_machines(details.metrics.history),
        "kept": format_kept_machines(details.metrics.history),
        "settings": format_settings(find_non_defaults(record)),
        "tags": ", ".join(details.annotations.tags),
        "noted": details.annotations.note,
    }
    for name, value in rows.items():
        if value:
            _print_row(screen, name, value, width)


def _print_row(screen: Console, name: str, value: str, width: int) -> None:
    """Print a titled row; a long value is wrapped between words."""
    for number, part in enumerate(_wrap_words(convert_for_terminal(value), width - _INDENT - 2)):
        line = Text(f"  {name if number == 0 else '':<{_INDENT}}", "dim")
        screen.print(line.append(part, "default not dim"))


def _wrap_words(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _format_experiment(record: RunRecord) -> str:
    if record.program_argv:
        return f"the program {shlex.join(record.program_argv)}"
    return f"{record.experiment} ({record.entry_point})" if record.entry_point else ""


def _format_times(details: RunDetails) -> str:
    """Return when it was started and how long it trained. The status knows the last start, the
    history or the first line of metrics the first one."""
    started, metrics = details.record.run_status.started, details.metrics
    phases = metrics.history.phases
    begun = phases[0].started if phases else metrics.first_time or started
    text = format_timestamp(max(0, min(begun, started)))
    again = ", went on" if begun < started else ","
    text += f"{again} {format_duration(time.time() - started)} ago"
    if details.trained_s is None:
        return text
    verb = "took" if details.record.program_argv else "trained for"
    return f"{text}; {verb} {format_duration(details.trained_s)}"


def _format_launcher(record: RunRecord) -> str:
    status = record.run_status
    if status.launcher is None:
        return ""
    place = f"job {status.job}" if status.job else f"on {status.host}"
    nodes, world = status.nodes, status.world
    size = (
        f", {_format_count(nodes, 'node')}, {_format_count(world, 'process')}"
        if nodes and world
        else ""
    )
    return f"{status.launcher} {place if status.job or status.host else ''}".strip() + size


def _format_origin(run: Run) -> str:
    """Return where a run is that is on a cluster, and how old this copy of it is."""
    origin = read_origin(run)
    if origin is None:
        return ""
    age = format_time_ago(read_copy_state(run).asked)
    return f"{origin.host}:{origin.folder}, copied {age}"


def _format_count(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural if count != 1 else ''}"


def _format_progress(details: RunDetails) -> str:
    total = details.record.facts.total_steps
    if details.step is None:
        return ""
    return f"{details.step} of {total} steps" if total else f"step {details.step}"


def _format_speed_row(details: RunDetails) -> str:
    """Return the speed by the last lines of the last start, whose size may differ from those
    before; the split of a step is a mean of the last samples, because a single step says little."""
    last, parts = measure_recent_speed(details.record, details.metrics.history)
    if not last:
        return ""
    of = ", ".join(f"{part} {format_three_digits(ms)}" for part, ms in parts.items())
    text = ", ".join(format_speed(last)) + (f"; of a step: {of} ms" if of else "")
    if last.get("slowest_x", 0) >= 1.5:
        text += f"; rank {last['slowest_rank']:.0f} takes {last['slowest_x']:g} × the median"
    return text


def measure_recent_speed(
    record: RunRecord, history: RunHistory
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the last value of each metric of speed since the last start, and the milliseconds of
    a step by its parts, each a mean of the last samples; both empty without lines of training."""
    phases = history.training_phases
    since = phases[-1].trained_since if phases else None
    lines = read_recent_metrics(record.run.metrics_file)
    recent = [line for line in lines if since is None or line["time"] >= since]
    values = {
        name: found
        for name in SPEED_METRICS
        if (found := [line[name] for line in recent if is_number(line.get(name))])
    }
    last = {name: found[-1] for name, found in values.items()}
    parts = {
        part: statistics.fmean(values[f"{part}_ms"][-_RECENT_SAMPLES:])
        for part in ("data", "compute", "communication", "optimizer")
        if f"{part}_ms" in values
    }
    return last, parts


# --- results and curves ---


def _render_results(metrics: RunMetrics, width: int) -> list[Text]:
    curves = [c for c in metrics.curves.values() if c.name not in SPEED_METRICS]
    lines: list[Text] = []
    if curves:
        columns = _build_result_columns(curves)
        tables = (Table([columns[i] for i in kept], header_style="", indent=2) for kept in _LAYOUTS)
        lines += choose_table(tables, width).render(width)
    if metrics.not_finite:
        text = f"  {metrics.not_finite} values were not finite and are left out"
        lines.append(Text(convert_for_terminal(truncate_text(text, width))))
    return lines


def _build_result_columns(curves: Sequence[Curve]) -> list[TableColumn]:
    names, *numbers = zip(*(_format_result(curve) for curve in curves), strict=True)
    bests, best_steps, kinds, lasts, last_steps = numbers
    return [
        TableColumn("METRIC", names),
        TableColumn("BEST", bests, is_right_aligned=True),
        TableColumn("AT STEP", best_steps, is_right_aligned=True),
        TableColumn("", kinds),
        TableColumn("LAST", lasts, is_right_aligned=True),
        TableColumn("AT STEP", last_steps, is_right_aligned=True),
    ]


def _format_result(curve: Curve) -> tuple[str, ...]:
    if curve.name == "lr":
        return (curve.name, "", "", "", f"{curve.values[-1]:g}", str(curve.steps[-1]))
    at, last = curve.best_index, (format_digits(curve.values[-1]), str(curve.steps[-1]))
    how = "highest" if curve.best_is == "max" else "lowest"
    return (curve.name, format_digits(curve.values[at]), str(curve.steps[at]), how, *last)


_LAYOUTS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 4, 5), (0, 1, 4)]
"""Of columns. The first that fits is taken."""


def _render_curves(details: RunDetails, width: int) -> Iterator[str]:
    curves = [curve for curve in details.metrics.default_curves if len(curve.values) > 1]
    if not curves:
        yield _explain_no_curves(details)
        return
    glyphs = BRAILLE if can_print_unicode(sys.stdout, os.environ) else ASCII
    in_a_row = max(1, min(len(curves), (width + 2) // (_MIN_PANEL_WIDTH + 2)))
    each = min(_MAX_PANEL_WIDTH, (width + 2) // in_a_row - 2)
    for start in range(0, min(len(curves), _MAX_PANELS), in_a_row):
        yield ""
        row = curves[start : min(start + in_a_row, _MAX_PANELS)]
        panels = [TextPanel(curve.name, curve.steps, curve.means, "step") for curve in row]
        yield from join_side_by_side(
            [draw_panel(panel, each, _PANEL_HEIGHT, glyphs) for panel in panels]
        )
    if len(curves) > _MAX_PANELS:
        name = format_run_argument(details.record.run)
        yield f"  and {len(curves) - _MAX_PANELS} more: echelon plot {name}"


def _explain_no_curves(details: RunDetails) -> str:
    if details.record.program_argv:
        return "  no curves: a program of its own keeps its numbers to itself"
    if details.metrics.curves:
        return "  no curves yet: one point makes none"
    return "  no numbers yet" if details.record.run_status.is_active else "  it left no numbers"


# --- files, and what to type ---


def _describe_images(run: Run) -> str:
    """Return where the images that were logged are, or nothing."""
    try:
        count = sum(name.endswith(".png") for name in os.listdir(run.media_folder))
    except OSError:
        return ""
    return f"{shorten_path(run.media_folder)}, {_format_count(count, 'file')}" if count else ""


def _describe_mirror(record: RunRecord) -> str:
    """Return what the mirror in an object store holds, or nothing."""
    mirror = _get_mirror(record)
    if mirror is None:
        return ""
    step, problem = mirror.get("step"), mirror.get("problem")
    there = "empty" if step is None else f"at step {step}"
    return f"{mirror.get('url')} {there}" + (f"; newer ones are not: {problem}" if problem else "")


def _get_mirror(record: RunRecord) -> dict[str, Any] | None:
    mirror = record.facts.status.get("mirror")
    return mirror if isinstance(mirror, dict) else None


def list_run_snapshots(run: Run) -> list[tuple[int, bool, Path]]:
    """Return step, whether it is the best, and folder of each snapshot, oldest first."""
    best = find_best(run.snapshots_folder)
    folders = list_snapshots(run.snapshots_folder, ignore_errors=True)
    return [(parse_step(folder.name) or 0, folder == best, folder) for folder in folders]


def _list_files(run: Run) -> dict[str, Path]:
    named = {"metrics": run.metrics_file, "config": run.config_file, "logs": run.logs_folder}
    return {name: path for name, path in named.items() if path.exists()}


def _list_locations(record: RunRecord) -> dict[str, str]:
    steps = [f"{s} (best)" if best else str(s) for s, best, _ in list_run_snapshots(record.run)]
    snapshots = (
        f"{shorten_path(record.run.snapshots_folder)} at step {', '.join(steps)}" if steps else ""
    )
    rows = {
        "folder": shorten_path(record.run.folder),
        "snapshots": snapshots,
        "mirror": _describe_mirror(record),
        "images": _describe_images(record.run),
    }
    return {name: value for name, value in rows.items() if value}


def _suggest_commands(details: RunDetails) -> dict[str, str]:
    record, name = details.record, shlex.quote(format_run_argument(details.record.run))
    rows = {}
    if details.metrics.default_curves:
        rows["draw"] = f"echelon plot {name} -o curves.html"
    if record.run.logs_folder.exists():
        rows["read"] = f"echelon logs {name}" + (" -f" if record.run_status.is_active else "")
    if record.run_status.is_active:
        rows["end"] = f"echelon cancel {name}"
    if record.run.origin_file.exists() and record.has_trained:
        rows["snapshots"] = f"echelon pull {name}"
    if not record.run_status.is_active and not record.problem:
        done = details.step is not None and details.step == record.facts.total_steps
        longer = "epochs" if record.get_section("trainer").get("steps") is None else "steps"
        more = f" trainer.{longer}=…" if done else ""
        script = find_script(record.entry_point)
        rows["go on"] = (
            f"echelon resume {name}{more}" if script is None else suggest_resume(record.run, script)
        )
    return rows
