"""The metrics of a run as curves by step, their best values, and where a step is on other axes.

Values that are not finite are left out and counted; lines that are cut or strange are skipped. A
file of any length is read in bounded memory (`runs.downsample`).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.runs.downsample import CurveSampler
from echelon.runs.history import RunHistory, read_history
from echelon.runs.metric_direction import guess_best_is
from echelon.runs.metrics_file import (
    SPEED_METRICS,
    MetricsLine,
    is_number,
    iterate_metrics,
    read_first_metrics,
    read_recent_metrics,
)
from echelon.runs.metrics_summary import (
    NOT_METRICS,
    MetricsSummary,
    is_training_line,
    read_summary,
)
from echelon.runs.record import RunRecord
from echelon.runs.run_folder import Run

AXES = ("step", "epoch", "samples", "time")
_HIDDEN_METRICS = {"lr", *SPEED_METRICS}
"""Drawn only when they are named."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, in the order of its steps; never empty."""

    name: str
    best_is: str
    """Whether its best is the `min` or the `max`."""
    steps: list[float]
    values: list[float]
    """All of them, or of a long curve the lowest, the highest and the last of every piece."""
    means: list[float]
    """For each value the mean of its piece; of a curve with all its values these themselves."""
    count: int
    """How many values the run has logged."""

    @property
    def best_index(self) -> int:
        """The index of the first of the best."""
        best = max(self.values) if self.best_is == "max" else min(self.values)
        return self.values.index(best)


@dataclass(frozen=True)
class AxisPoints:
    """Where steps are on the other axes, by the lines of training; of a long run a part of them."""

    steps: list[float]
    samples: list[float]
    trained_s: list[float]


@dataclass(frozen=True)
class RunMetrics:
    """All metrics of a run."""

    curves: dict[str, Curve]
    """The training loss first, then what was evaluated, then the rest."""
    not_finite: int
    axis_points: AxisPoints
    steps_per_epoch: float | None
    """As far as the lines tell."""
    first_time: float | None
    """Of the first line of training."""
    history: RunHistory

    @property
    def can_be_drawn(self) -> bool:
        """Whether there are lines of training and something to draw of them."""
        return bool(self.axis_points.steps and self.default_curves)

    @property
    def default_curves(self) -> list[Curve]:
        """The curves that are drawn when none is named: the loss and what was evaluated."""
        return [c for name, c in self.curves.items() if name not in _HIDDEN_METRICS]


def load_metrics(record: RunRecord) -> RunMetrics:
    """Return the metrics of a run; empty if its file cannot be read."""
    history = read_record_history(record)
    reading = _MetricsReading(history)
    for line in _iterate_lines(record.run):
        if is_number(line.get("step")):
            reading.add(line)
    ordered = sort_metric_names(reading.samplers, record.best_name)
    axis_steps, samples = reading.samples.list_last_points()
    return RunMetrics(
        {name: _make_curve(name, reading.samplers[name], record) for name in ordered},
        reading.not_finite,
        AxisPoints(axis_steps, samples, reading.trained_s.list_last_points()[1]),
        reading.steps_per_epoch,
        reading.first_time,
        history,
    )


def read_record_history(record: RunRecord) -> RunHistory:
    """Return the history of a run by its present state. A run that is queued again does not run:
    its last start has ended, whether it wrote that down or not."""
    return read_history(record.run, record.run_status.state == "running")


@dataclass
class _MetricsReading:
    """What one pass over metrics.jsonl collects."""

    history: RunHistory
    samplers: dict[str, CurveSampler] = field(default_factory=dict)
    samples: CurveSampler = field(default_factory=CurveSampler)
    trained_s: CurveSampler = field(default_factory=CurveSampler)
    not_finite: int = 0
    steps_per_epoch: float | None = None
    first_time: float | None = None
    _begun: float = 0.0

    def add(self, line: MetricsLine) -> None:
        """Add a line that has a step."""
        step = line["step"]
        for name, value in line.items():
            if name in NOT_METRICS:
                continue
            if is_number(value):
                sampler = self.samplers.get(name)
                if sampler is None:
                    sampler = self.samplers[name] = CurveSampler()
                sampler.add(step, value)
            else:
                self.not_finite += isinstance(value, float)
        if is_training_line(line):
            self._add_training_line(step, line)

    def _add_training_line(self, step: float, line: MetricsLine) -> None:
        if self.first_time is None:
            self.first_time, self._begun = line["time"], estimate_begin(line)
        self.samples.add(step, line["samples"])
        self.trained_s.add(step, self._count_trained_s(line["time"]))
        if is_number(epoch := line.get("epoch")) and epoch:
            # An epoch is named from its first step to its last: the fullest one is the nearest.
            self.steps_per_epoch = max(self.steps_per_epoch or 0.0, step / epoch)

    def _count_trained_s(self, moment: float) -> float:
        if self.history.training_phases:
            return self.history.count_trained_s(moment)
        return max(0.0, moment - self._begun)


def estimate_begin(first_line: MetricsLine) -> float:
    """Return when training began, by its first line and the speed in it."""
    samples, samples_per_s = first_line["samples"], first_line["samples_per_s"]
    return float(first_line["time"] - samples / max(1e-9, samples_per_s))


def _iterate_lines(run: Run) -> Iterator[MetricsLine]:
    try:
        yield from iterate_metrics(run.metrics_file)
    except OSError:  # no permission, or no file at all
        return


def sort_metric_names(names: Iterable[str], best: str) -> list[str]:
    """Return the names with the training loss first, then the metric that decides the best
    snapshot, what else was evaluated, and the rest."""
    first = ("loss", f"eval_{best}")
    return sorted(names, key=lambda n: (*(n != one for one in first), not n.startswith("eval_"), n))


def _make_curve(name: str, sampler: CurveSampler, record: RunRecord) -> Curve:
    best_is = choose_best_direction(name, record)
    return Curve(name, best_is, *sampler.list_points(), sampler.count)


def choose_best_direction(name: str, record: RunRecord) -> str:
    """Return whether the best value of a metric is its `min` or its `max`."""
    bare = name.removeprefix("eval_")
    if name == f"eval_{record.best_name}":
        return record.best_is
    return guess_best_is(bare) or "min"


# --- other axes ---


@dataclass(frozen=True)
class StepScale:
    """Converts steps to another axis: linear between points, which begin at (0, 0)."""

    steps: list[float]
    positions: list[float]

    def convert(self, step: float) -> float:
        """Return the position of a step."""
        if len(self.steps) < 2:
            return float(step)
        i = min(max(1, bisect_right(self.steps, step)), len(self.steps) - 1)
        (s0, s1), (p0, p1) = self.steps[i - 1 : i + 1], self.positions[i - 1 : i + 1]
        return p0 + (p1 - p0) * (step - s0) / (s1 - s0) if s1 > s0 else p1


def build_scale(axis: str, record: RunRecord, metrics: RunMetrics) -> StepScale:
    """Return the scale of an axis (step, epoch, samples or time) for a run."""
    points = metrics.axis_points
    if axis == "samples":
        return StepScale([0.0, *points.steps], [0.0, *points.samples])
    if axis == "time":
        return StepScale([0.0, *points.steps], [0.0, *points.trained_s])
    trainer, total_steps = record.get_section("trainer"), record.facts.total_steps
    size = estimate_steps_per_epoch(trainer, total_steps, metrics.steps_per_epoch)
    if axis == "epoch" and size:
        return StepScale([0.0, size], [0.0, 1.0])
    return StepScale([], [])


def estimate_steps_per_epoch(
    trainer: Mapping[str, Any], total_steps: int | None, found: float | None
) -> float | None:
    """Return how many steps an epoch has, by the settings of the trainer if they say it, else as
    the lines show it."""
    epochs = trainer.get("epochs")
    if trainer.get("steps") is None and total_steps and is_number(epochs) and epochs:
        return float(total_steps / epochs)
    return found


# --- a glance, for lists ---


@dataclass(frozen=True)
class RunProgress:
    """How far a run is."""

    step: int | None
    total_steps: int | None
    eta_s: float | None
    """Until its end, of a running one."""


@dataclass(frozen=True)
class RunOverview:
    """What a list of runs shows of one run's metrics."""

    progress: RunProgress
    best: float | None
    best_name: str
    """`loss` of a run that evaluates nothing is `train loss`, its last."""
    trained_s: float | None
    summary: MetricsSummary


def read_progress(record: RunRecord) -> RunProgress:
    """Return how far a run is, by its status and the last lines of metrics.jsonl."""
    lines = read_recent_metrics(record.run.metrics_file)
    return _derive_progress(record, lines[-1]["step"] if lines else None, lines)


def read_overview(record: RunRecord) -> RunOverview:
    """Return the overview by the run's small files: status, summary and history. Of metrics.jsonl
    only the lines are read that its summary does not have yet."""
    is_running = record.run_status.state == "running"
    lines = read_recent_metrics(record.run.metrics_file) if is_running else []
    return derive_overview(record, read_summary(record.run), read_record_history(record), lines)


def derive_overview(
    record: RunRecord,
    summary: MetricsSummary,
    history: RunHistory,
    recent_lines: Sequence[MetricsLine],
) -> RunOverview:
    """Return the overview by a summary and a history that are known already, and the last lines of
    metrics.jsonl of a run that is running."""
    name, best = record.best_name, record.facts.best
    has_trained = summary.last_training_step is not None
    if best is None and has_trained and (evaluated := summary.metrics.get(f"eval_{name}")):
        best = evaluated.get_best(record.best_is)
    if best is None and has_trained and (loss := summary.metrics.get("loss")):
        name, best = "train loss", loss.last
    progress = _derive_progress(record, summary.last_step, recent_lines)
    return RunOverview(progress, best, name, _count_trained_s(record, summary, history), summary)


def _derive_progress(
    record: RunRecord, logged_step: float | None, lines: Sequence[MetricsLine]
) -> RunProgress:
    facts = record.facts
    step = int(max(logged_step or 0, facts.step or 0)) or None
    eta_s = _estimate_eta_s(record, lines) if record.run_status.state == "running" else None
    return RunProgress(step, facts.total_steps, eta_s)


def _estimate_eta_s(record: RunRecord, lines: Sequence[MetricsLine]) -> float | None:
    """Return the remaining seconds at the speed since the last start, evaluations and saves
    included; None if the lines are too few."""
    total, since = record.facts.total_steps, record.facts.get_number("since") or 0.0
    recent = [line for line in lines if line["time"] >= since]
    if total is None or len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    if last["step"] <= first["step"]:
        return None
    pace_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
    ready: float = last["time"] + pace_s * (total - last["step"])
    return max(0.0, ready - time.time())


def _count_trained_s(
    record: RunRecord, summary: MetricsSummary, history: RunHistory
) -> float | None:
    """Return the seconds of training by the run's history. Without one, which programs in a job of
    their own and older runs do not have, it is the time from the first line to the last."""
    if history.phases:
        return history.trained_s
    first = read_first_metrics(record.run.metrics_file)
    if first is None or not is_training_line(first) or summary.last_time is None:
        return _get_lifetime_s(record)
    return max(0.0, summary.last_time - estimate_begin(first))


def _get_lifetime_s(record: RunRecord) -> float | None:
    """Return for a program without metrics the time from its start to the last change of its
    status."""
    started, updated = record.facts.get_number("started"), record.facts.get_number("updated")
    if not record.program_argv or started is None or updated is None:
        return None
    return max(0.0, (time.time() if record.run_status.is_active else updated) - started)
