"""`echelon show RUN`: what it was, what came of it, its curves, and what to type next."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from echelon.errors import Exit
from echelon.jobs.table import STYLES, UNBROKEN, columns
from echelon.runs import Run
from echelon.track.lines import SPEED, pace, three_digits
from echelon.track.summary import short, spoken
from echelon.utils.text import (
    can_print_unicode,
    convert_for_terminal,
    format_duration,
    format_timestamp,
    truncate_text,
)
from echelon.view.canvas import ASCII, BRAILLE, Panel, beside, drawn
from echelon.view.listing import digits
from echelon.view.metrics import Curve, Metrics, glance, load
from echelon.view.record import Record, find, records
from echelon.view.settings import changed, spelled
from echelon.view.terminal import console

VERSION = 1
"""Of what --json prints."""
_PANEL = 38
"""Columns of a panel at the least."""
_WIDEST_PANEL = 64
_HEIGHT = 9
_PANELS = 6
_PIPED = 80
_INDENT = 12
_RECENT = 8


@dataclass(frozen=True)
class Seen:
    record: Record
    metrics: Metrics
    step: int | None
    worked_s: float | None

    @classmethod
    def of(cls, run: Run) -> Seen:
        [record], silence = records([run])
        if silence:
            print(f"warning: Slurm does not answer: {silence}", file=sys.stderr)
        seen = glance(record)
        return cls(record, load(record), seen.step, seen.worked_s)


def show_run(where: str, root: str, as_json: bool) -> int:
    seen = Seen.of(find(where, root))
    if as_json:
        print(json.dumps(_data(seen), indent=2))
        return Exit.OK
    screen = console()
    width = min(columns(screen), 200)
    _print_head(seen, screen, width)
    screen.print()
    for line in _results(seen.metrics, width):
        screen.print(convert_for_terminal(truncate_text(line, width)))
    for line in _curves(seen, _PIPED if columns(screen) == UNBROKEN else width):
        screen.print(line)
    screen.print()
    for name, value in (_places(seen.record) | _commands(seen)).items():
        _print_row(screen, name, value, width)
    return Exit.OK


def _data(seen: Seen) -> dict[str, Any]:
    record, standing = seen.record, seen.record.standing
    return {
        "version": VERSION,
        "run": record.name,
        "folder": str(record.run.folder),
        "experiment": record.experiment,
        "entry": record.entry or None,
        "program": record.program or None,
        "state": record.state,
        "note": record.broken or standing.note,
        "started": standing.started,
        "trained_s": seen.worked_s,
        **{key: getattr(standing, key) for key in ("launcher", "job", "host", "nodes", "world")},
        "step": seen.step,
        "total_steps": record.count("total_steps"),
        "settings": changed(record),
        "metrics": {name: _extremes(curve) for name, curve in seen.metrics.curves.items()},
        "snapshots": [
            {"step": step, "best": is_best, "folder": str(folder)}
            for step, is_best, folder in _snapshots(record.run)
        ],
        "files": {name: str(path) for name, path in _files(record.run).items()},
    }


def _extremes(curve: Curve) -> dict[str, Any]:
    at = curve.best_at
    return {
        "is": curve.is_best,
        "best": curve.values[at],
        "best_step": curve.steps[at],
        "last": curve.values[-1],
        "last_step": curve.steps[-1],
        "count": len(curve.values),
    }


# --- the head ---


def _print_head(seen: Seen, screen: Console, width: int) -> None:
    record = seen.record
    head = Text(convert_for_terminal(record.name), "bold")
    head.append("  ").append(record.state, STYLES.get(record.state, ""))
    screen.print(head)
    note = record.broken or record.standing.note
    rows = {
        "why" if not record.standing.active else "note": note,
        "experiment": _what(record),
        "when": _when(seen),
        "where": _where(record),
        "progress": _progress(seen),
        "speed": _speed(seen.metrics),
        "settings": spelled(changed(record)),
    }
    for name, value in rows.items():
        if value:
            _print_row(screen, name, value, width)


def _print_row(screen: Console, name: str, value: str, width: int) -> None:
    """Long ones are broken between words, and go on below themselves."""
    for number, part in enumerate(_wrapped(convert_for_terminal(value), width - _INDENT - 2)):
        line = Text(f"  {name if number == 0 else '':<{_INDENT}}", "dim")
        screen.print(line.append(part, "default not dim"))


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _what(record: Record) -> str:
    if record.program:
        return f"the program {shlex.join(record.program)}"
    return f"{record.experiment} ({record.entry})" if record.entry else ""


def _when(seen: Seen) -> str:
    """`started` is of the last time that it was typed, the first line of metrics of the first."""
    started, lines = seen.record.standing.started, seen.metrics.lines
    begun = lines[0]["time"] if lines else started
    text = format_timestamp(max(0, min(begun, started)))
    again = ", went on" if begun < started else ","
    text += f"{again} {format_duration(time.time() - started)} ago"
    if seen.worked_s is None:
        return text
    verb = "took" if seen.record.program else "trained for"
    return f"{text}; {verb} {format_duration(seen.worked_s)}"


def _where(record: Record) -> str:
    standing = record.standing
    if standing.launcher is None:
        return ""
    place = f"job {standing.job}" if standing.job else f"on {standing.host}"
    nodes, world = standing.nodes, standing.world
    size = f", {_counted(nodes, 'node')}, {_counted(world, 'process')}" if nodes and world else ""
    return f"{standing.launcher} {place if standing.job or standing.host else ''}".strip() + size


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural if count != 1 else ''}"


def _progress(seen: Seen) -> str:
    total = seen.record.count("total_steps")
    if seen.step is None:
        return ""
    return f"{seen.step} of {total} steps" if total else f"step {seen.step}"


def _speed(metrics: Metrics) -> str:
    """By the last lines; a part of a step is the mean of what was sampled there, since a step by
    itself says little."""
    last = {name: metrics.curves[name].values[-1] for name in SPEED if name in metrics.curves}
    if not last:
        return ""
    parts = {}
    for part in ("data", "compute", "communication", "optimizer"):
        if curve := metrics.curves.get(f"{part}_ms"):
            recent = curve.values[-_RECENT:]
            parts[part] = sum(recent) / len(recent)
    of = ", ".join(f"{part} {three_digits(ms)}" for part, ms in parts.items())
    text = ", ".join(pace(last)) + (f"; of a step: {of} ms" if of else "")
    if last.get("slowest_x", 0) >= 1.5:
        text += f"; rank {last['slowest_rank']:.0f} takes {last['slowest_x']:g} × the median"
    return text


# --- results and curves ---


def _results(metrics: Metrics, width: int) -> list[str]:
    curves = [c for c in metrics.curves.values() if c.name not in SPEED]
    lines: list[str] = []
    if curves:
        head = ("METRIC", "BEST", "AT STEP", "", "LAST", "AT STEP")
        rows = [head, *(_result(curve) for curve in curves)]
        for kept in _LAYOUTS:
            lines = _aligned(rows, kept)
            if max(map(len, lines)) <= width:
                break
    if metrics.not_finite:
        lines.append(f"  {metrics.not_finite} values were not finite and are left out")
    return lines


def _result(curve: Curve) -> tuple[str, ...]:
    if curve.name == "lr":
        return (curve.name, "", "", "", f"{curve.values[-1]:g}", str(curve.steps[-1]))
    at, last = curve.best_at, (digits(curve.values[-1]), str(curve.steps[-1]))
    how = "highest" if curve.is_best == "max" else "lowest"
    return (curve.name, digits(curve.values[at]), str(curve.steps[at]), how, *last)


_LAYOUTS = [(0, 1, 2, 3, 4, 5), (0, 1, 2, 4, 5), (0, 1, 4)]
"""Of columns. The first that fits is taken."""


def _aligned(rows: Sequence[Sequence[str]], kept: Sequence[int]) -> list[str]:
    left = (0, 3)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{row[i]:<{widths[i]}}" if i in left else f"{row[i]:>{widths[i]}}" for i in kept)
        for row in rows
    ]
    return [f"  {line}".rstrip() for line in lines]


def _curves(seen: Seen, width: int) -> Iterator[str]:
    curves = [curve for curve in seen.metrics.shown if len(curve.values) > 1]
    if not curves:
        yield _no_curves(seen)
        return
    letters = BRAILLE if can_print_unicode(sys.stdout, os.environ) else ASCII
    in_a_row = max(1, min(len(curves), (width + 2) // (_PANEL + 2)))
    each = min(_WIDEST_PANEL, (width + 2) // in_a_row - 2)
    for start in range(0, min(len(curves), _PANELS), in_a_row):
        yield ""
        row = curves[start : min(start + in_a_row, _PANELS)]
        panels = [Panel(curve.name, curve.steps, curve.values, "step") for curve in row]
        yield from beside([drawn(panel, each, _HEIGHT, letters) for panel in panels])
    if len(curves) > _PANELS:
        yield f"  and {len(curves) - _PANELS} more: echelon plot {spoken(seen.record.run)}"


def _no_curves(seen: Seen) -> str:
    if seen.record.program:
        return "  no curves: a program of its own keeps its numbers to itself"
    if seen.metrics.curves:
        return "  no curves yet: one point makes none"
    return "  no numbers yet" if seen.record.standing.active else "  it left no numbers"


# --- files, and what to type ---


def _snapshots(run: Run) -> list[tuple[int, bool, Path]]:
    best = ""
    with contextlib.suppress(OSError, ValueError):
        best = (run.snapshots / "best").read_text(encoding="utf-8").strip()
    found = [(p.name.partition("-")[2], p) for p in sorted(run.snapshots.glob("step-*"))]
    return [(int(step), p.name == best, p) for step, p in found if step.isdecimal()]


def _files(run: Run) -> dict[str, Path]:
    named = {"metrics": run.metrics_file, "config": run.config_file, "logs": run.logs}
    return {name: path for name, path in named.items() if path.exists()}


def _places(record: Record) -> dict[str, str]:
    steps = [f"{s} (best)" if best else str(s) for s, best, _ in _snapshots(record.run)]
    kept = f"{short(record.run.snapshots)} at step {', '.join(steps)}" if steps else ""
    rows = {"folder": short(record.run.folder), "snapshots": kept}
    return {name: value for name, value in rows.items() if value}


def _commands(seen: Seen) -> dict[str, str]:
    record, name = seen.record, shlex.quote(spoken(seen.record.run))
    rows = {}
    if seen.metrics.shown:
        rows["draw"] = f"echelon plot {name} -o curves.html"
    if record.run.logs.exists():
        rows["read"] = f"echelon logs {name}" + (" -f" if record.standing.active else "")
    if record.standing.active:
        rows["end"] = f"echelon cancel {name}"
    elif not record.broken:
        done = seen.step is not None and seen.step == record.count("total_steps")
        longer = "epochs" if record.section("trainer").get("steps") is None else "steps"
        rows["go on"] = f"echelon resume {name}" + (f" trainer.{longer}=…" if done else "")
    return rows
