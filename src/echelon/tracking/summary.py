"""The summary at the end of a run: how it went, where things are, what to type next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import ExitCode
from echelon.runs.metrics_file import read_metrics
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.utils.text import can_print_unicode, convert_to_ascii, format_count

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"


def render_summary(
    run: Run,
    outcome: ExitCode,
    step: int,
    total: int,
    seconds: float,
    reason: str,
    tracker_rows: Mapping[str, str],
    length_setting: str = "trainer.epochs",
    unsaved_reason: str | None = None,
) -> str:
    """Return the summary as text.

    ``tracker_rows`` are rows of the trackers by title. ``length_setting`` is the setting that says
    how long the run trains. ``unsaved_reason`` says why the last state is not on disk, if it is
    not.
    """
    if outcome is ExitCode.PREEMPTED:
        saved = (
            "everything is saved"
            if unsaved_reason is None
            else f"this step is not saved: {unsaved_reason}"
        )
        first_line = f"stopped by {reason} after step {step} of {total}; {saved}"
    elif total == 0:
        first_line = "nothing to train: trainer.epochs=0"
    elif seconds < 0:
        first_line = f"nothing left to do: all {total} steps were already made"
    else:
        first_line = f"finished {format_count(total, 'step')} in {seconds:.1f} s"
    rows = {
        "loss": _render_losses(read_metrics(run.metrics_file)),
        "run": shorten_path(run.folder),
        "snapshot": _format_newest_snapshot(run),
        "metrics": shorten_path(run.metrics_file),
        **tracker_rows,
        "look": f"echelon show {format_run_argument(run)}",
        "go on": f"echelon resume {format_run_argument(run)}"
        + ("" if step < total else f" {length_setting}=…"),
    }
    text = "\n".join([first_line, *format_rows(rows)])
    if can_print_unicode(sys.stderr, os.environ):
        return text
    return convert_to_ascii(text).translate(str.maketrans(_BARS, _ASCII_BARS))


def format_rows(rows: Mapping[str, str]) -> list[str]:
    """Return an aligned line for each row that has a text."""
    return [f"  {title:<10}{text}" for title, text in rows.items() if text]


def render_sparkline(values: list[float], width: int = 32) -> str:
    """Return a curve in one line of text, on a logarithmic scale if its values need one."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    picked = [values[int(i * step)] for i in range(min(width, len(values)))]
    if needs_log_scale(min(picked), max(picked)):
        picked = [math.log(v) for v in picked]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in picked)


def needs_log_scale(low: float, high: float) -> bool:
    """Return whether only a logarithmic scale shows the lower part of such a range."""
    return low > 0 and high / low > 20


def _render_losses(lines: list[dict[str, Any]]) -> str:
    losses = [line["loss"] for line in lines if "loss" in line]
    return f"{losses[0]:.4g} {render_sparkline(losses)} {losses[-1]:.4g}" if losses else ""


def _format_newest_snapshot(run: Run) -> str:
    folders = list_snapshots(run.snapshots_folder, ignore_errors=True)
    return shorten_path(folders[-1]) if folders else ""


def shorten_path(path: Path) -> str:
    """Return the path relative to this folder where that is shorter to read and to type."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def format_run_argument(run: Run) -> str:
    """Return what to type to name this run: its name in ./runs, otherwise its path."""
    return run.name if run.folder.parent == Path("runs").absolute() else shorten_path(run.folder)
