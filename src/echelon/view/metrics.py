"""The numbers of a run: curves by step, where each step lies on other axes, and the best of each.

Values that are not finite are left out and counted; lines that are cut or strange are skipped.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from echelon.jobs.standing import tail
from echelon.runs import Run
from echelon.track import jsonl
from echelon.track.lines import SPEED
from echelon.view.record import Record, is_number

AXES = ("step", "epoch", "samples", "time")
_NOT_CURVES = {"step", "epoch", "samples", "time"}
_ON_REQUEST = {"lr", *SPEED}
"""Drawn only when they are named."""
_HIGHER_IS_BETTER = re.compile(
    r"(?<![a-z])(acc|accuracy|auc|auroc|auprc|f1|recall|precision|ndcg|mrr|map|hits?|r2|bleu"
    r"|rouge[a-z]?|m?iou|dice|psnr|ssim|mfu|samples_per_s|corr|correlation|pearson|spearman|(f1|r2)?scores?)(?![a-z])"
)
"""Whole words: `mape` and `accumulated_error` are errors."""
_NEXT_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
"""In a name such as `BinaryAccuracy`."""
_HEAD_BYTES = 4096
_PAUSE_S = 60.0
"""What takes less is none."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, in the order of its steps; never empty."""

    name: str
    is_best: str
    """Whether its best is the `min` or the `max`."""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def best_at(self) -> int:
        """The index of the first of the best."""
        best = max(self.values) if self.is_best == "max" else min(self.values)
        return self.values.index(best)


@dataclass(frozen=True)
class Metrics:
    curves: dict[str, Curve]
    """The training loss first, then what was evaluated, then the rest."""
    not_finite: int
    lines: list[dict[str, Any]]
    """Those of training: step, samples and time are numbers."""
    worked_s: list[float]
    """Up to each of these lines."""

    @property
    def shown(self) -> list[Curve]:
        return [c for name, c in self.curves.items() if name not in _ON_REQUEST]


def load(record: Record) -> Metrics:
    curves: dict[str, Curve] = {}
    not_finite = 0
    found = [line for line in _read(record.run) if is_number(line.get("step"))]
    for line in found:
        for name in line.keys() - _NOT_CURVES:
            value = line[name]
            if is_number(value):
                curve = curves.get(name) or curves.setdefault(name, _curve(name, record))
                curve.steps.append(line["step"])
                curve.values.append(value)
            else:
                not_finite += isinstance(value, float)
    ordered = in_order(curves, record.best_name)
    lines = [line for line in found if _is_training(line)]
    worked = _worked_s(lines, _evaluated(found), record.starts)
    return Metrics({name: curves[name] for name in ordered}, not_finite, lines, worked)


def _read(run: Run) -> list[dict[str, Any]]:
    try:
        return jsonl.read(run.metrics_file)
    except OSError:  # no permission, or no file at all
        return []


def in_order(names: Iterable[str], best: str) -> list[str]:
    """The training loss, what says which snapshot is best, what else was evaluated, the rest."""
    first = ("loss", f"eval_{best}")
    return sorted(names, key=lambda n: (*(n != one for one in first), not n.startswith("eval_"), n))


def _curve(name: str, record: Record) -> Curve:
    bare = name.removeprefix("eval_")
    if name == f"eval_{record.best_name}":
        return Curve(name, record.best_is)
    words = _NEXT_WORD.sub("_", bare).lower()
    return Curve(name, "max" if _HIGHER_IS_BETTER.search(words) else "min")


def _is_training(line: dict[str, Any]) -> bool:
    return all(is_number(line.get(key)) for key in ("step", "samples", "samples_per_s", "time"))


def _evaluated(lines: Sequence[dict[str, Any]]) -> list[bool]:
    """For each line of training, whether an evaluation lies before it and after the last."""
    found, between = [], False
    for line in lines:
        if _is_training(line):
            found.append(between)
            between = False
        else:
            between = True
    return found


def _worked_s(
    lines: Sequence[dict[str, Any]], evaluated: Sequence[bool], starts: Sequence[float]
) -> list[float]:
    """Seconds at work up to each line of training.

    A run that was stopped and went on has pauses between its lines. The status knows when it last
    went on, and of a batch job every start. Of others the lines themselves tell: what was taken
    beyond their own pace is a pause when it is far longer than the usual, e.g. an evaluation.
    """
    taken, beyond = [], []
    before: dict[str, Any] | None = None
    for line in lines:
        new = line["samples"] - (before["samples"] if before else 0)
        pace = max(0.0, new / max(1e-9, line["samples_per_s"]))
        passed = max(0.0, line["time"] - before["time"]) if before else pace
        known = before is not None and any(before["time"] < s <= line["time"] for s in starts)
        taken.append(min(pace, passed))
        beyond.append(0.0 if known else max(0.0, passed - pace))
        before = line
    if lines and any(start > lines[0]["time"] for start in starts):
        beyond = _without_pauses(beyond, evaluated)
    return list(accumulate(a + b for a, b in zip(taken, beyond, strict=True)))


def _without_pauses(beyond: Sequence[float], evaluated: Sequence[bool]) -> list[float]:
    longest = {}
    for kind in (True, False):
        mine = [b for b, e in zip(beyond, evaluated, strict=True) if e is kind]
        longest[kind] = max(_PAUSE_S, 5 * statistics.median(mine)) if mine else _PAUSE_S
    return [b if b <= longest[e] else 0.0 for b, e in zip(beyond, evaluated, strict=True)]


# --- other axes ---


@dataclass(frozen=True)
class Scale:
    """Where a step lies: straight between points, which begin at (0, 0)."""

    steps: list[float]
    places: list[float]

    def at(self, step: float) -> float:
        if len(self.steps) < 2:
            return float(step)
        i = min(max(1, bisect_right(self.steps, step)), len(self.steps) - 1)
        (s0, s1), (p0, p1) = self.steps[i - 1 : i + 1], self.places[i - 1 : i + 1]
        return p0 + (p1 - p0) * (step - s0) / (s1 - s0) if s1 > s0 else p1


def scale(axis: str, record: Record, metrics: Metrics) -> Scale:
    steps = [float(line["step"]) for line in metrics.lines]
    if axis == "samples":
        return Scale([0.0, *steps], [0.0, *(float(line["samples"]) for line in metrics.lines)])
    if axis == "time":
        return Scale([0.0, *steps], [0.0, *metrics.worked_s])
    if axis == "epoch" and (size := _steps_per_epoch(record, metrics)):
        return Scale([0.0, size], [0.0, 1.0])
    return Scale([], [])


def _steps_per_epoch(record: Record, metrics: Metrics) -> float | None:
    trainer, total = record.section("trainer"), record.count("total_steps")
    epochs = trainer.get("epochs")
    if trainer.get("steps") is None and total and is_number(epochs) and epochs:
        return float(total / epochs)
    # An epoch is named from its first step to its last: the fullest one seen is the nearest.
    sizes = [li["step"] / li["epoch"] for li in metrics.lines if is_number(li.get("epoch"))]
    return max(sizes, default=None)


# --- a glance, for lists ---


@dataclass(frozen=True)
class Glance:
    step: int | None
    best: float | None
    best_name: str
    """`loss` of a run that evaluates nothing is `train loss`, its last."""
    worked_s: float | None


def glance(record: Record) -> Glance:
    """By the ends of metrics.jsonl; the whole file only where its middle matters."""
    last = _last_line(record.run)
    step = max(last["step"] if last else 0, record.count("step") or 0) or None
    name, best = record.best_name, record.best
    if best is None and last:
        best = _scan_best(record)
    if best is None and last and is_number(last.get("loss")):
        name, best = "train loss", last["loss"]
    return Glance(step, best, name, _worked_at_a_glance(record, last))


def _scan_best(record: Record) -> float | None:
    """Of a run whose status does not tell. The lines are searched as text: ten times as fast."""
    number = re.compile(rb'"eval_' + re.escape(record.best_name).encode() + rb'": (-?[0-9.eE+-]+)')
    try:
        found = [float(text) for text in number.findall(record.run.metrics_file.read_bytes())]
    except (OSError, ValueError):
        return None
    finite = [value for value in found if math.isfinite(value)]
    if not finite:
        return None
    return max(finite) if record.best_is == "max" else min(finite)


def _worked_at_a_glance(record: Record, last: dict[str, Any] | None) -> float | None:
    first = _first_line(record.run) if last else None
    if first is None or last is None:
        return _lifetime_s(record)
    if all(start <= first["time"] for start in record.starts):
        begun = first["time"] - first["samples"] / max(1e-9, first["samples_per_s"])
        return max(0.0, float(last["time"] - begun))
    worked = load(record).worked_s
    return worked[-1] if worked else None


def _lifetime_s(record: Record) -> float | None:
    """Of a program that tells no numbers: from its start to the last word of its status."""
    started, updated = record.time("started"), record.time("updated")
    if not record.program or started is None or updated is None:
        return None
    return max(0.0, (time.time() if record.standing.active else updated) - started)


def _first_line(run: Run) -> dict[str, Any] | None:
    try:
        with run.metrics_file.open("rb") as file:
            return _training_line(file.readline(_HEAD_BYTES))
    except OSError:
        return None


def _last_line(run: Run) -> dict[str, Any] | None:
    texts = reversed(tail(run.metrics_file).splitlines())
    return next((line for text in texts if (line := _training_line(text))), None)


def _training_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and _is_training(line) else None
