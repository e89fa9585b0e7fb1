"""The metrics of a run in a few numbers each, kept in ``summary.json`` for lists.

The summary says how far it has read metrics.jsonl, so that a reader only adds what came later. A
training writes it every few seconds. For a program that writes metrics.jsonl by itself, and for a
training that was killed, whoever reads many new lines keeps the result for the next reader.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.runs.metrics_file import MetricsFollower, MetricsLine, is_number
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically

NOT_METRICS = frozenset({"step", "epoch", "samples", "time"})
"""Where a line is, not what was measured there."""
_FORMAT = 1
_MIN_KEPT_BYTES = 16 * 1024
"""Fewer new bytes are read faster than a file is written."""


@dataclass(slots=True)
class MetricSummary:
    """One metric of one run: how many values, and which of them matter."""

    count: int
    last: float
    last_step: float
    min: float
    min_step: float
    max: float
    max_step: float

    def add(self, step: float, value: float) -> None:
        """Add a value. Of equal ones the first is the best."""
        self.count += 1
        self.last, self.last_step = value, step
        if value < self.min:
            self.min, self.min_step = value, step
        if value > self.max:
            self.max, self.max_step = value, step

    def get_best(self, best_is: str) -> float:
        """Return the best value, which is the `min` or the `max`."""
        return self.max if best_is == "max" else self.min


@dataclass
class MetricsSummary:
    """All metrics of one run up to a position in its file. Values that are not finite are
    counted and otherwise left out."""

    metrics: dict[str, MetricSummary] = field(default_factory=dict)
    not_finite: int = 0
    last_step: float | None = None
    last_time: float | None = None
    """Of the last line that has one."""
    last_training_step: float | None = None
    """Of the last line that has samples and a speed."""
    offset: int = 0
    """Bytes of metrics.jsonl that are in it."""
    mark: str = ""
    """The checksum of the bytes before; see `MetricsFollower`."""
    updated: float | None = None
    """When the training wrote it; None if a reader did."""

    def add(self, line: MetricsLine) -> None:
        """Add a line; one without a step counts for nothing."""
        step = line.get("step")
        if not is_number(step):
            return
        self.last_step = step
        if is_number(line.get("time")):
            self.last_time = line["time"]
        if is_training_line(line):
            self.last_training_step = step
        for name, value in line.items():
            if name in NOT_METRICS:
                continue
            if not is_number(value):
                self.not_finite += isinstance(value, float)
            elif (known := self.metrics.get(name)) is not None:
                known.add(step, value)
            else:
                self.metrics[name] = MetricSummary(1, value, step, value, step, value, step)


def is_training_line(line: MetricsLine) -> bool:
    """Return whether a line is one of training, with step, samples, speed and time."""
    return all(is_number(line.get(key)) for key in ("step", "samples", "samples_per_s", "time"))


def read_summary(run: Run) -> MetricsSummary:
    """Return the summary of all lines of a run, reading only those that are not in its file yet.

    If these are many, the result is kept, but only in a folder of one's own: nobody wants files
    of somebody else in a run.
    """
    summary = load_summary(run)
    follower = MetricsFollower(run.metrics_file, summary.offset, summary.mark)
    lines, is_new = follower.read_new_lines()
    if is_new:
        summary = MetricsSummary()
    known_bytes = summary.offset
    for line in lines:
        summary.add(line)
    summary.offset, summary.mark = follower.offset, follower.mark
    if summary.offset - known_bytes >= _MIN_KEPT_BYTES and _owns_folder(run):
        write_summary(run, summary)
    return summary


def load_summary(run: Run) -> MetricsSummary:
    """Return what summary.json holds; empty if it is missing, damaged or of another version."""
    data = read_json_object(run.summary_file) or {}
    if data.pop("version", None) != _FORMAT:
        return MetricsSummary()
    try:
        metrics = {name: MetricSummary(**values) for name, values in data.pop("metrics").items()}
        return MetricsSummary(metrics, **data)
    except (KeyError, TypeError, AttributeError):
        return MetricsSummary()


def write_summary(run: Run, summary: MetricsSummary, *, by_training: bool = False) -> None:
    """Replace summary.json. Two writers cannot harm each other: either file says how far it goes.
    A full disk must not end a training over it."""
    data: dict[str, Any] = {"version": _FORMAT, **asdict(summary)}
    data["updated"] = time.time() if by_training else summary.updated
    with contextlib.suppress(OSError):
        write_json_atomically(run.summary_file, data)


def _owns_folder(run: Run) -> bool:
    with contextlib.suppress(OSError):
        return run.folder.stat().st_uid == os.geteuid()
    return False
