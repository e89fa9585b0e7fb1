"""One run in the table of `echelon runs`, and everything about it that has a name.

A name is one of ours (`state`, `time`, `tags`, …), a setting (`lr`, `trainer.batch_size`), or a
metric (`accuracy` or `eval_accuracy`, its last value; `accuracy.best`, `.min`, `.max`). Where two
are called the same, the first of these three is meant: `lr` is the setting, `lr.last` the metric.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from echelon.config.schema import Config, flatten
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.runs.annotations import Annotations, read_annotations
from echelon.runs.curves import RunOverview, choose_best_direction, read_overview
from echelon.runs.metrics_file import SPEED_METRICS, is_number
from echelon.runs.record import RunRecord
from echelon.utils.text import format_duration, format_timestamp
from echelon.views.run_settings import flatten_settings, format_setting_value
from echelon.views.table import STATE_STYLES, TableColumn

_DURATIONS = ("time", "age")
_MOMENTS = ("when", "started")
_MACHINE_SETTINGS = ("launch.", "run.", "track.")
_SUFFIXES = ("last", "best", "min", "max")
_MISSING = "–"


@dataclass(frozen=True)
class RunRow:
    """One run in the table. Its files are read when they are needed."""

    record: RunRecord

    @cached_property
    def metrics_overview(self) -> RunOverview:
        """The overview of its metrics."""
        return read_overview(self.record)

    @cached_property
    def annotations(self) -> Annotations:
        """Its tags and its note."""
        return read_annotations(self.record.run)

    @cached_property
    def own_values(self) -> dict[str, Any]:
        """What every run has, by name."""
        record, status, overview = self.record, self.record.run_status, self.metrics_overview
        return {
            **{"name": record.name, "run": record.name, "folder": str(record.run.folder)},
            **{"experiment": record.experiment, "state": record.state},
            "why": record.problem or status.note or None,
            "step": overview.progress.step,
            "total_steps": overview.progress.total_steps,
            "best": overview.best,
            "time": overview.trained_s,
            **{"when": status.started, "started": status.started},
            "age": max(0.0, time.time() - status.started),
            **{"launcher": status.launcher, "host": status.host, "job": status.job},
            **{"nodes": status.nodes, "processes": status.world},
            "tags": ",".join(self.annotations.tags) or None,
            "note": self.annotations.note or None,
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its settings, dotted or bare: those of the experiment and of `trainer` by both."""
        flat = flatten_settings(self.record)
        experiment = {f"experiment.{key}": value for key, value in flat.items() if "." not in key}
        trainer = {
            key.removeprefix("trainer."): value
            for key, value in flat.items()
            if key.startswith("trainer.")
        }
        return trainer | experiment | flat

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Its metrics, with and without `eval_`, and with what is meant of them."""
        found: dict[str, float] = {}
        metrics = self.metrics_overview.summary.metrics
        for name, summary in metrics.items():
            bare = name.removeprefix("eval_")
            for alias in {name, name if bare in metrics else bare}:
                best = summary.get_best(choose_best_direction(name, self.record))
                numbers = (summary.last, best, summary.min, summary.max)
                found[alias] = summary.last
                found |= {f"{alias}.{s}": n for s, n in zip(_SUFFIXES, numbers, strict=True)}
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """All of it, by name: what a run can be sorted and filtered by, and shown."""
        return self.metrics | self.settings | self.own_values

    def is_metric(self, key: str) -> bool:
        """Return whether a name means a metric of this run."""
        return key in self.metrics and key not in self.settings and key not in self.own_values

    def get_sort_key(self, key: str) -> tuple[int, float, str]:
        """Return by what the run is sorted: metrics by the best first, everything else ascending,
        missing values last."""
        value = self.values.get(key)
        if is_number(value):
            is_reversed = self.is_metric(key) and self._is_higher_better(key)
            return 0, -value if is_reversed else value, ""
        return (2, 0.0, "") if value is None else (1, 0.0, format_setting_value(value))

    def _is_higher_better(self, key: str) -> bool:
        bare, _, suffix = key.rpartition(".")
        name = bare if suffix in _SUFFIXES else key
        known = self.metrics_overview.summary.metrics
        full_name = name if name in known else f"eval_{name}"
        return choose_best_direction(full_name, self.record) == "max"

    def format_value(self, key: str) -> str:
        """Return a value as a cell of the table."""
        value = self.values.get(key)
        if value is None:
            return _MISSING
        if key in self.own_values and key in _DURATIONS:
            return format_duration(value)
        if key in self.own_values and key in _MOMENTS:
            return format_timestamp(value)
        if self.is_metric(key) or (key == "best" and is_number(value)):
            return format_digits(value)
        return format_setting_value(value)


def format_digits(value: float) -> str:
    """Return a value with four significant digits, so that values in a column can be compared."""
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= abs(value) < 1e5 or not value else f"{value:.3g}"


def build_chosen_columns(rows: Sequence[RunRow], names: Sequence[str]) -> list[TableColumn]:
    """Return the columns with these names, after that of the run itself."""
    named = names if {"run", "name"} & set(names) else ["run", *names]
    columns = []
    for name in named:
        cells = [row.format_value(name) for row in rows]
        is_text = name in ("run", "name", "state", "note", "why", "tags", "folder")
        styles = ["bold"] * len(rows) if name in ("run", "name") else []
        if name == "state":
            styles = [STATE_STYLES.get(cell, "") for cell in cells]
        columns.append(TableColumn(name.upper(), cells, not is_text, styles, min_width=1))
    return columns


def require_known_names(names: Sequence[str], rows: Sequence[RunRow], option: str) -> None:
    """Raise EchelonError for names that no run has, all at once, with those that there are."""
    if not rows or not names:  # nothing is asked, so nothing has to be read
        return
    known = {name for row in rows for name in row.values}
    faults = [
        Fault(f"{option}: no run has {name!r}", _suggest_names(name, rows))
        for name in names
        if name not in known
    ]
    if faults:
        raise EchelonError(*faults)


def _suggest_names(name: str, rows: Sequence[RunRow]) -> str:
    logged = {n for row in rows for n in row.metrics_overview.summary.metrics}
    metrics = {n if (bare := n.removeprefix("eval_")) in logged else bare for n in logged}
    metrics -= set(SPEED_METRICS)
    settings = {n for row in rows for n in flatten_settings(row.record)}
    experiment_settings = sorted(settings - flatten(Config().to_dict()).keys())
    own = set(rows[0].own_values)
    likely = {n for n in settings if not n.startswith(_MACHINE_SETTINGS)}
    nearest = suggest_nearest(name, metrics | likely | own).partition("known: ")[0]
    listed = [
        f"every run has {', '.join(sorted(own))}",
        f"metrics: {', '.join(sorted(metrics - settings))}" if metrics - settings else "",
        f"settings: {', '.join([*experiment_settings, 'seed', 'trainer.epochs'])}, …",
    ]
    return f"{nearest.strip()} {'; '.join(text for text in listed if text)}".strip()
