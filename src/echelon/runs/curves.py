"""The metrics of a run as curves by step, their best values, and where a step is on other axes.

Values that are not finite are left out and counted; lines that are cut or strange are skipped.
"""

from __future__ import annotations

import re
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from echelon.runs.metrics_file import (
    SPEED_METRICS,
    MetricsLine,
    is_number,
    read_first_metrics,
    read_metrics,
    read_recent_metrics,
    scan_metric,
)
from echelon.runs.record import RunRecord
from echelon.runs.run_folder import Run

AXES = ("step", "epoch", "samples", "time")
_NOT_CURVES = {"step", "epoch", "samples", "time"}
_HIDDEN_METRICS = {"lr", *SPEED_METRICS}
"""Drawn only when they are named."""
_HIGHER_IS_BETTER = re.compile(
    r"(?<![a-z])(acc|accuracy|auc|auroc|auprc|f1|recall|precision|ndcg|mrr|map|hits?|r2|bleu"
    r"|rouge[a-z]?|m?iou|dice|psnr|ssim|mfu|samples_per_s|corr|correlation|pearson|spearman|(f1|r2)?scores?)(?![a-z])"
)
"""Whole words: `mape` and `accumulated_error` are errors."""
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
"""In a name such as `BinaryAccuracy`."""
_MIN_PAUSE_S = 60.0
"""A gap between two lines that is shorter than this is not a pause."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, in the order of its steps; never empty."""

    name: str
    best_is: str
    """Whether its best is the `min` or the `max`."""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def best_index(self) -> int:
        """The index of the first of the best."""
        best = max(self.values) if self.best_is == "max" else min(self.values)
        return self.values.index(best)


@dataclass(frozen=True)
class RunMetrics:
    """All metrics of a run."""

    curves: dict[str, Curve]
    """The training loss first, then what was evaluated, then the rest."""
    not_finite: int
    lines: list[MetricsLine]
    """Those of training: step, samples and time are numbers."""
    trained_s: list[float]
    """Up to each of these lines."""

    @property
    def default_curves(self) -> list[Curve]:
        """The curves that are drawn when none is named: the loss and what was evaluated."""
        return [c for name, c in self.curves.items() if name not in _HIDDEN_METRICS]


def load_metrics(record: RunRecord) -> RunMetrics:
    """Return the metrics of a run; empty if its file cannot be read."""
    curves: dict[str, Curve] = {}
    not_finite = 0
    lines_with_step = [line for line in _read_lines(record.run) if is_number(line.get("step"))]
    for line in lines_with_step:
        for name in line.keys() - _NOT_CURVES:
            value = line[name]
            if is_number(value):
                curve = curves.get(name) or curves.setdefault(name, _create_curve(name, record))
                curve.steps.append(line["step"])
                curve.values.append(value)
            else:
                not_finite += isinstance(value, float)
    ordered = sort_metric_names(curves, record.best_name)
    lines = [line for line in lines_with_step if _is_training_line(line)]
    trained_s = _accumulate_trained_s(
        lines, _mark_lines_after_evaluation(lines_with_step), record.facts.start_times
    )
    return RunMetrics({name: curves[name] for name in ordered}, not_finite, lines, trained_s)


def _read_lines(run: Run) -> list[MetricsLine]:
    try:
        return read_metrics(run.metrics_file)
    except OSError:  # no permission, or no file at all
        return []


def sort_metric_names(names: Iterable[str], best: str) -> list[str]:
    """Return the names with the training loss first, then the metric that decides the best
    snapshot, what else was evaluated, and the rest."""
    first = ("loss", f"eval_{best}")
    return sorted(names, key=lambda n: (*(n != one for one in first), not n.startswith("eval_"), n))


def _create_curve(name: str, record: RunRecord) -> Curve:
    bare = name.removeprefix("eval_")
    if name == f"eval_{record.best_name}":
        return Curve(name, record.best_is)
    words = _WORD_BORDER.sub("_", bare).lower()
    return Curve(name, "max" if _HIGHER_IS_BETTER.search(words) else "min")


def _is_training_line(line: MetricsLine) -> bool:
    """Return whether a line is one of training, with step, samples, speed and time."""
    return all(is_number(line.get(key)) for key in ("step", "samples", "samples_per_s", "time"))


def _mark_lines_after_evaluation(lines: Sequence[MetricsLine]) -> list[bool]:
    """Return for each line of training whether an evaluation was logged between it and the one
    before."""
    found, between = [], False
    for line in lines:
        if _is_training_line(line):
            found.append(between)
            between = False
        else:
            between = True
    return found


def _accumulate_trained_s(
    lines: Sequence[MetricsLine], evaluated: Sequence[bool], starts: Sequence[float]
) -> list[float]:
    """Return the seconds of training up to each line of training, without pauses.

    A run that was stopped and resumed has pauses between its lines. The status knows when it was
    last resumed, and every start of a batch job. Other starts are found from the lines themselves:
    time beyond their own speed is a pause if it is far longer than the usual excess, such as that
    of an evaluation.
    """
    taken_s, beyond_pace_s = [], []
    before: MetricsLine | None = None
    for line in lines:
        new = line["samples"] - (before["samples"] if before else 0)
        pace = max(0.0, new / max(1e-9, line["samples_per_s"]))
        passed = max(0.0, line["time"] - before["time"]) if before else pace
        known = before is not None and any(before["time"] < s <= line["time"] for s in starts)
        taken_s.append(min(pace, passed))
        beyond_pace_s.append(0.0 if known else max(0.0, passed - pace))
        before = line
    if lines and any(start > lines[0]["time"] for start in starts):
        beyond_pace_s = _remove_pauses(beyond_pace_s, evaluated)
    return list(accumulate(a + b for a, b in zip(taken_s, beyond_pace_s, strict=True)))


def _remove_pauses(beyond: Sequence[float], evaluated: Sequence[bool]) -> list[float]:
    """Return the times with those that are far above the median, of their kind, set to zero."""
    longest = {}
    for kind in (True, False):
        mine = [b for b, e in zip(beyond, evaluated, strict=True) if e is kind]
        longest[kind] = max(_MIN_PAUSE_S, 5 * statistics.median(mine)) if mine else _MIN_PAUSE_S
    return [b if b <= longest[e] else 0.0 for b, e in zip(beyond, evaluated, strict=True)]


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
    steps = [float(line["step"]) for line in metrics.lines]
    if axis == "samples":
        return StepScale([0.0, *steps], [0.0, *(float(line["samples"]) for line in metrics.lines)])
    if axis == "time":
        return StepScale([0.0, *steps], [0.0, *metrics.trained_s])
    if axis == "epoch" and (size := _estimate_steps_per_epoch(record, metrics)):
        return StepScale([0.0, size], [0.0, 1.0])
    return StepScale([], [])


def _estimate_steps_per_epoch(record: RunRecord, metrics: RunMetrics) -> float | None:
    trainer, total = record.get_section("trainer"), record.facts.total_steps
    epochs = trainer.get("epochs")
    if trainer.get("steps") is None and total and is_number(epochs) and epochs:
        return float(total / epochs)
    # An epoch is named from its first step to its last: the fullest one seen is the nearest.
    sizes = [li["step"] / li["epoch"] for li in metrics.lines if is_number(li.get("epoch"))]
    return max(sizes, default=None)


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


def read_progress(record: RunRecord) -> RunProgress:
    """Return how far a run is, by its status and the last lines of metrics.jsonl."""
    return _derive_progress(record, read_recent_metrics(record.run.metrics_file))


def read_overview(record: RunRecord) -> RunOverview:
    """Return the overview by the first and last lines of metrics.jsonl. The whole file is read
    only if the run was resumed or its best value is not in its status."""
    lines = read_recent_metrics(record.run.metrics_file)
    last = next((line for line in reversed(lines) if _is_training_line(line)), None)
    name, best = record.best_name, record.facts.best
    if best is None and last:
        best = _scan_best_value(record)
    if best is None and last and is_number(last.get("loss")):
        name, best = "train loss", last["loss"]
    trained_s = _estimate_trained_s(record, last)
    return RunOverview(_derive_progress(record, lines), best, name, trained_s)


def _derive_progress(record: RunRecord, lines: Sequence[MetricsLine]) -> RunProgress:
    facts = record.facts
    step = max(lines[-1]["step"] if lines else 0, facts.step or 0) or None
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


def _scan_best_value(record: RunRecord) -> float | None:
    """Return the best value of a run whose status does not have it."""
    values = scan_metric(record.run.metrics_file, f"eval_{record.best_name}")
    if not values:
        return None
    return max(values) if record.best_is == "max" else min(values)


def _estimate_trained_s(record: RunRecord, last: MetricsLine | None) -> float | None:
    """Return the seconds of training, by the first and last lines where that is enough."""
    first = read_first_metrics(record.run.metrics_file) if last else None
    if first is None or last is None or not _is_training_line(first):
        return _get_lifetime_s(record)
    if all(start <= first["time"] for start in record.facts.start_times):
        begun = first["time"] - first["samples"] / max(1e-9, first["samples_per_s"])
        return max(0.0, float(last["time"] - begun))
    worked = load_metrics(record).trained_s
    return worked[-1] if worked else None


def _get_lifetime_s(record: RunRecord) -> float | None:
    """Return for a program without metrics the time from its start to the last change of its
    status."""
    started, updated = record.facts.get_number("started"), record.facts.get_number("updated")
    if not record.program_argv or started is None or updated is None:
        return None
    return max(0.0, (time.time() if record.run_status.is_active else updated) - started)
