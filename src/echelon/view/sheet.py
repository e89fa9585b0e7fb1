"""What a drawing of several runs holds, before anybody draws it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.errors import EchelonError, Exit, Fault, nearest
from echelon.track.summary import falls_far, short
from echelon.view.metrics import Curve, Metrics, in_order, scale
from echelon.view.record import Record
from echelon.view.settings import compact, differing, spelled
from echelon.view.smooth import FEW, averaged, fitting

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


@dataclass(frozen=True)
class Wanted:
    metrics: Sequence[str]
    """Empty: the loss and all that was evaluated."""
    x: str
    smooth: float | None
    log: bool | None
    """None: where values fall far."""
    title: str


@dataclass(frozen=True)
class Line:
    run: int
    """Which of the sheet's."""
    xs: list[float]
    ys: list[float]
    smoothed: list[float] | None
    """None where there is nothing to smooth."""
    best: int
    """The index of its best value."""


@dataclass(frozen=True)
class Panel:
    metric: str
    is_best: str
    log: bool
    top: float | None
    """Where the scale ends, when some run has left all others behind."""
    lines: list[Line]

    @property
    def notes(self) -> str:
        """What a reader has to know beside its name."""
        better = "higher is better" if self.is_best == "max" else "lower is better"
        notes = [better] if self.metric.startswith("eval_") else []
        notes += ["log scale"] if self.log else []
        gone = sum(self.top is not None and max(line.ys) > self.top for line in self.lines)
        notes += [f"{gone} run{'s leave' if gone > 1 else ' leaves'} the scale"] if gone else []
        return ", ".join(notes)

    @property
    def best_line(self) -> Line:
        """The one that holds the best of all."""
        sign = -1 if self.is_best == "max" else 1
        return min(self.lines, key=lambda line: sign * line.ys[line.best])


@dataclass(frozen=True)
class Legend:
    name: str
    differs: str

    def __str__(self) -> str:
        return f"{self.name}  {self.differs}".rstrip()


@dataclass(frozen=True)
class Sheet:
    title: str
    x: str
    runs: list[Legend]
    panels: list[Panel]


def sheet(records: Sequence[Record], metrics: Sequence[Metrics], wanted: Wanted) -> Sheet:
    """Of runs that have metrics."""
    names = _chosen(metrics, wanted.metrics, records[0].best_name)
    scales = [scale(wanted.x, r, m) for r, m in zip(records, metrics, strict=True)]
    furthest = max(s.at(m.lines[-1]["step"]) for s, m in zip(scales, metrics, strict=True))
    unit = _time_unit(furthest) if wanted.x == "time" else ""
    size = _UNITS_S.get(unit, 1.0)
    panels = []
    for name in names:
        found = {run: m.curves[name] for run, m in enumerate(metrics) if name in m.curves}
        xs = {run: [scales[run].at(s) / size for s in c.steps] for run, c in found.items()}
        panels.append(_panel(name, found, xs, wanted))
    x = f"time at work ({unit})" if unit else wanted.x
    return Sheet(wanted.title, x, _legends(records), [panel for panel in panels if panel.lines])


def _panel(
    name: str, curves: dict[int, Curve], xs: dict[int, list[float]], wanted: Wanted
) -> Panel:
    top = _top([max(curve.values) for curve in curves.values()])
    every = [v for curve in curves.values() for v in curve.values if top is None or v <= top]
    log = falls_far(min(every), max(every)) if wanted.log is None else wanted.log
    is_best = next(iter(curves.values())).is_best
    lines, left_out = [], 0
    for run, curve in curves.items():
        kept = [i for i, value in enumerate(curve.values) if value > 0 or not log]
        left_out += len(curve.values) - len(kept)
        if kept:
            ys = [curve.values[i] for i in kept]
            best = ys.index(max(ys) if is_best == "max" else min(ys))
            lines.append(
                Line(run, [xs[run][i] for i in kept], ys, _smoothed(ys, wanted.smooth, log), best)
            )
    if left_out:
        print(
            f"warning: {name}: {left_out} values have no logarithm and are left out",
            file=sys.stderr,
        )
    return Panel(name, is_best, log, top, lines)


def _top(peaks: Sequence[float]) -> float | None:
    """One run that diverges would press all others flat."""
    near = 100 * statistics.median_low(peaks)
    if 0 < near < max(peaks):
        return 1.2 * max(peak for peak in peaks if peak <= near)
    return None


def _smoothed(ys: Sequence[float], smooth: float | None, log: bool) -> list[float] | None:
    much = fitting(ys) if smooth is None else smooth
    return averaged(ys, much, log) if much and len(ys) >= FEW else None


def _chosen(metrics: Sequence[Metrics], wanted: Sequence[str], best: str) -> list[str]:
    """`rmse` may be said for `eval_rmse`."""
    known = dict.fromkeys(name for m in metrics for name in m.curves)
    if not wanted:
        return in_order({curve.name for m in metrics for curve in m.shown}, best)
    named = [name if name in known else f"eval_{name}" for name in dict.fromkeys(wanted)]
    short_names = {bare if (bare := n.removeprefix("eval_")) not in known else n for n in known}
    faults = [
        Fault(f"--metric {asked}: none of these runs has it", nearest(asked, short_names))
        for asked, name in zip(dict.fromkeys(wanted), named, strict=True)
        if name not in known
    ]
    if faults:
        raise EchelonError(*faults, exit=Exit.NOT_FOUND)
    return named


def _time_unit(longest_s: float) -> str:
    fitting_units = [unit for unit, size in _UNITS_S.items() if longest_s >= 2 * size]
    return fitting_units[-1] if fitting_units else "s"


def _legends(records: Sequence[Record]) -> list[Legend]:
    differ, _ = compact(differing(records))
    names = [record.name for record in records]
    if len(set(names)) < len(names):  # of several folders of runs
        names = [short(record.run.folder) for record in records]
    return [Legend(name, spelled(words)) for name, words in zip(names, differ, strict=True)]
