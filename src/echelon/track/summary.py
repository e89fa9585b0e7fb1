"""The last words of a run: how it went, where things are, what to type next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import Exit
from echelon.runs import Run
from echelon.track.jsonl import read
from echelon.utils.text import can_print_unicode, convert_to_ascii, format_count

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"


def summary(
    run: Run,
    outcome: Exit,
    step: int,
    total: int,
    seconds: float,
    reason: str,
    tracked: Mapping[str, str],
    longer: str = "trainer.epochs",
    unsaved: str | None = None,
) -> str:
    """`longer` is the setting that says how long it trains; `unsaved`, why the last state is on no
    disk."""
    if outcome is Exit.PREEMPTED:
        kept = "everything is saved" if unsaved is None else f"this step is not saved: {unsaved}"
        first = f"stopped by {reason} after step {step} of {total}; {kept}"
    elif total == 0:
        first = "nothing to train: trainer.epochs=0"
    elif seconds < 0:
        first = f"nothing left to do: all {total} steps were already made"
    else:
        first = f"finished {format_count(total, 'step')} in {seconds:.1f} s"
    rows = {
        "loss": _losses(read(run.metrics_file)),
        "run": short(run.folder),
        "snapshot": _newest(run),
        "metrics": short(run.metrics_file),
        **tracked,
        "look": f"echelon show {spoken(run)}",
        "go on": f"echelon resume {spoken(run)}" + ("" if step < total else f" {longer}=…"),
    }
    text = "\n".join([first, *titled(rows)])
    if can_print_unicode(sys.stderr, os.environ):
        return text
    return convert_to_ascii(text).translate(str.maketrans(_BARS, _ASCII_BARS))


def titled(rows: Mapping[str, str]) -> list[str]:
    """A line for each that says something."""
    return [f"  {title:<10}{text}" for title, text in rows.items() if text]


def sparkline(values: list[float], width: int = 32) -> str:
    """A curve in one line, on a logarithmic scale when it falls far."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    picked = [values[int(i * step)] for i in range(min(width, len(values)))]
    if falls_far(min(picked), max(picked)):
        picked = [math.log(v) for v in picked]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in picked)


def falls_far(low: float, high: float) -> bool:
    """Whether only a logarithmic scale shows the lower part of such a range."""
    return low > 0 and high / low > 20


def _losses(lines: list[dict[str, Any]]) -> str:
    losses = [line["loss"] for line in lines if "loss" in line]
    return f"{losses[0]:.4g} {sparkline(losses)} {losses[-1]:.4g}" if losses else ""


def _newest(run: Run) -> str:
    folders = sorted(run.snapshots.glob("step-*"))
    return short(folders[-1]) if folders else ""


def short(path: Path) -> str:
    """Relative where that is shorter to read and to type."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def spoken(run: Run) -> str:
    return run.name if run.folder.parent == Path("runs").absolute() else short(run.folder)
