"""The summary at the end of a run: how it went, where things are, what to type next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from echelon.errors import ExitCode
from echelon.runs.accounting import STARTING, RunAccounting
from echelon.runs.downsample import CurveSampler
from echelon.runs.metrics_file import is_number, iterate_metrics
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.utils.text import (
    can_print_unicode,
    convert_to_ascii,
    format_count,
    format_elapsed,
)

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"


class TrainingProgress(NamedTuple):
    """How far a run came, in its last start and in all of them."""

    first_step: int
    """The step after which the last start went on."""
    step: int
    total_steps: int
    seconds: float
    """Of the last start."""
    whole_s: float | None = None
    """Of all starts; None if that is not known."""

    def format_steps(self) -> str:
        """Return how many steps were made in which time; after a resume also of the whole run."""
        made = format_count(self.step - self.first_step, "step")
        text = f"{made} in {format_elapsed(self.seconds)}"
        if self.first_step == 0:
            return text
        whole = "" if self.whole_s is None else f" in {format_elapsed(self.whole_s)}"
        return f"{text}; the whole run: {format_count(self.step, 'step')}{whole}"


def render_summary(
    run: Run,
    outcome: ExitCode,
    progress: TrainingProgress,
    reason: str,
    tracker_rows: Mapping[str, str],
    length_setting: str = "trainer.epochs",
    unsaved_reason: str | None = None,
    script: str | None = None,
) -> str:
    """Return the summary as text.

    ``tracker_rows`` are rows of the trackers by title. ``length_setting`` is the setting that says
    how long the run trains. ``unsaved_reason`` says why the last state is not on disk, if it is
    not. ``script`` is the script of the run, if it is one's.
    """
    step, total = progress.step, progress.total_steps
    if outcome is ExitCode.PREEMPTED:
        saved = (
            "everything is saved"
            if unsaved_reason is None
            else f"this step is not saved: {unsaved_reason}"
        )
        first_line = f"stopped by {reason} after step {step} of {total}; {saved}"
    elif total == 0:
        first_line = "nothing to train: trainer.epochs=0"
    elif step == progress.first_step:
        made = f"all {total} steps were already made"
        if step < total:
            made = f"the loop ended by itself after step {step} of {total}"
        first_line = f"nothing left to do: {made}"
    else:
        first_line = f"finished {progress.format_steps()}"
    rows = {
        "loss": _render_losses(run),
        "run": shorten_path(run.folder),
        "snapshot": _format_newest_snapshot(run),
        "metrics": shorten_path(run.metrics_file),
        **tracker_rows,
        "look": f"echelon show {format_run_argument(run)}",
        "go on": suggest_resume(run, script, "" if step < total else f"{length_setting}=…"),
    }
    text = "\n".join([first_line, *format_rows(rows)])
    if can_print_unicode(sys.stderr, os.environ):
        return text
    return convert_to_ascii(text).translate(str.maketrans(_BARS, _ASCII_BARS))


def format_effective_time(accounting: RunAccounting | None) -> str:
    """Return which part of the time since the first start was spent on steps that were kept, and
    what happened meanwhile; nothing where that is not known."""
    if accounting is None or accounting.effective_share is None:
        return ""
    text = f"{format_share(accounting.effective_share)} of {format_elapsed(accounting.wall_s)}"
    if not accounting.is_disturbed:
        return f"{text}; starting took {format_elapsed(accounting.lost_s[STARTING])}"
    counts = {
        "start": accounting.starts,
        "lost rank": accounting.lost_ranks,
        "replacement": accounting.replaced_ranks,
    }
    happened = [format_count(number, noun) for noun, number in counts.items() if number]
    if accounting.steps_redone:
        happened.append(f"{format_count(accounting.steps_redone, 'step')} made again")
    return f"{text}; {', '.join(happened)}"


def format_share(share: float) -> str:
    """`97.3 %`."""
    return f"{100 * share:.1f} %"


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


def _render_losses(run: Run) -> str:
    """Return the first loss, the curve and the last; the file may be of any length."""
    sampler = CurveSampler()
    for line in iterate_metrics(run.metrics_file):
        if is_number(loss := line.get("loss")):
            sampler.add(line.get("step", 0), loss)
    _, values, means = sampler.list_points()
    if not values:
        return ""
    return f"{sampler.first_value:.4g} {render_sparkline(means)} {values[-1]:.4g}"


def _format_newest_snapshot(run: Run) -> str:
    folders = list_snapshots(run.snapshots_folder, ignore_errors=True)
    return shorten_path(folders[-1]) if folders else ""


def shorten_path(path: Path) -> str:
    """Return the path relative to this folder where that is shorter to read and to type."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def suggest_resume(run: Run, script: str | None, setting: str = "") -> str:
    """Return how a run is continued: by a command, or by starting its script once more."""
    if script is not None:
        return f'start {script} again, with echelon.session("run.name={run.name}")'
    return f"echelon resume {format_run_argument(run)} {setting}".rstrip()


def format_run_argument(run: Run) -> str:
    """Return what to type to name this run: its name in ./runs, otherwise its path."""
    return run.name if run.folder.parent == Path("runs").absolute() else shorten_path(run.folder)
