"""What a row of the board says, by the names of `echelon runs`: to filter, sort, group and show it.

A condition is that of `echelon runs --filter`; only what it asks about is a row of JSON here.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.runs.metrics_file import SPEED_METRICS, is_number
from echelon.runs.status import ACTIVE_STATES
from echelon.utils.text import format_duration, format_timestamp
from echelon.views.run_row import format_digits
from echelon.views.run_settings import format_setting_value, is_relevant_setting
from echelon.views.runs_table import FilterCondition, parse_condition

Row = dict[str, Any]
MISSING = "–"
_SUFFIXES = ("last", "best", "min", "max")
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"?|'[^']*'?)+""")
_RELATION = re.compile(r"[\w.]+?(?:!=|<=|>=|=|<|>).*", re.DOTALL)
_MAX_SETTINGS = 10
_MAX_METRICS = 3
_TITLES = {"name": "RUN", "time": "TIME", "started": "STARTED"}
_LEFT_ALIGNED = {"name", "state", "experiment", "host", "tags", "note", "root", "why", "best"}

_OWN: dict[str, Callable[[Row], Any]] = {
    **{"name": lambda row: row["name"], "run": lambda row: row["name"]},
    **{"folder": lambda row: row.get("folder"), "experiment": lambda row: row.get("experiment")},
    **{"state": lambda row: row.get("state"), "why": lambda row: row.get("why") or None},
    **{"step": lambda row: row.get("step"), "total_steps": lambda row: row.get("total_steps")},
    **{"best": lambda row: row.get("best"), "time": lambda row: row.get("trained_s")},
    **{"when": lambda row: row.get("started"), "started": lambda row: row.get("started")},
    "age": lambda row: (
        max(0.0, time.time() - row["started"]) if is_number(row.get("started")) else None
    ),
    **{"launcher": lambda row: row.get("launcher"), "host": lambda row: row.get("host")},
    **{"job": lambda row: row.get("job"), "nodes": lambda row: row.get("nodes")},
    "processes": lambda row: row.get("processes"),
    "tags": lambda row: ",".join(row.get("tags") or ()) or None,
    "note": lambda row: row.get("note") or None,
}
"""What every run has, by name."""


class RowValues(Mapping[str, Any]):
    """Everything about a row that has a name, looked up when it is asked for. A name means what it
    means in `views.run_row.RunRow`."""

    def __init__(self, row: Row, defaults: Mapping[str, Any]) -> None:
        self.row = row
        self._defaults = defaults if _has_defaults(row) else {}

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (
            key in _OWN or self._find_setting(key) is not None or self._find_metric(key) is not None
        )

    def __getitem__(self, key: str) -> Any:
        if (read := _OWN.get(key)) is not None:
            return read(self.row)
        if (setting := self._find_setting(key)) is not None:
            return setting[0]
        if (metric := self._find_metric(key)) is not None:
            (last, low, high, _, best_is), suffix = metric
            best = high if best_is == "max" else low
            return {"last": last, "best": best, "min": low, "max": high}[suffix]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*_OWN, *self.row["settings"], *self._defaults])
        yield from self.row["metrics"]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def is_metric(self, key: str) -> bool:
        """Return whether a name means a metric of this run."""
        return (
            key not in _OWN
            and self._find_setting(key) is None
            and self._find_metric(key) is not None
        )

    def get_sort_key(self, key: str) -> tuple[Any, ...]:
        """Return by what the run is sorted, as `echelon runs --sort` does: metrics by the best
        first, everything else ascending, missing values last."""
        if key == "best":
            best, row = self.row.get("best"), self.row
            sign = -1 if row.get("best_is") == "max" else 1
            what = (row.get("experiment") or "", row.get("best_name") or "")
            return (best is None, *what, 0.0 if best is None else sign * best)
        value = self.get(key)
        if is_number(value):
            metric = self._find_metric(key) if self.is_metric(key) else None
            return 0, -value if metric is not None and metric[0][4] == "max" else value, ""
        return (2, 0.0, "") if value is None else (1, 0.0, format_setting_value(value))

    def _find_setting(self, key: str) -> tuple[Any] | None:
        """Return the value of a setting, dotted or bare, in a tuple; None without such a one."""
        names = [key, f"trainer.{key}"]
        if key.startswith("experiment.") and "." not in key[11:]:
            names.insert(1, key[11:])
        for name in names:
            for settings in (self.row["settings"], self._defaults):
                if name in settings:
                    return (settings[name],)
        return None

    def _find_metric(self, key: str) -> tuple[list[Any], str] | None:
        """Return the numbers of a metric, and which of them is meant."""
        if (numbers := self._look_up_metric(key)) is not None:
            return numbers, "last"
        name, _, suffix = key.rpartition(".")
        if suffix in _SUFFIXES and (numbers := self._look_up_metric(name)) is not None:
            return numbers, suffix
        return None

    def _look_up_metric(self, name: str) -> list[Any] | None:
        metrics = self.row["metrics"]
        found: list[Any] | None = metrics.get(name) or metrics.get(f"eval_{name}")
        return found


def _has_defaults(row: Row) -> bool:
    return row.get("source") == "echelon" and row.get("state") != "broken"


def is_active(row: Row) -> bool:
    """Return whether a run is queued, starts or runs."""
    return row.get("state") in ACTIVE_STATES


# --- what is typed into the box ---


@dataclass(frozen=True)
class RowQuery:
    """Which rows are meant by a line that was typed: conditions of --filter, and words that are
    searched for."""

    conditions: tuple[FilterCondition, ...] = ()
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RowQuery:
        """Raises EchelonError for words with a relation that are no conditions."""
        conditions, words, faults = [], [], []
        for word in _WORD.findall(text):
            bare = re.sub(r"""["']""", "", word)
            if not _RELATION.fullmatch(bare):
                words += [bare.lower()] if bare else []
                continue
            try:
                conditions.append(parse_condition(bare))
            except EchelonError as error:
                faults += [Fault(f.what.removeprefix("--filter "), f.do) for f in error.faults]
        if faults:
            raise EchelonError(*faults)
        return cls(tuple(conditions), tuple(words))

    def select(self, rows: Sequence[Row], defaults: Mapping[str, Any]) -> list[Row]:
        """Return the rows that meet all conditions and have all words. Raises EchelonError for
        names that no run has."""
        for condition in self.conditions:
            _require_known_name(condition.key, rows, defaults)
        return [row for row in rows if self._is_met(row, defaults)]

    def _is_met(self, row: Row, defaults: Mapping[str, Any]) -> bool:
        if self.conditions:
            values = RowValues(row, defaults)
            # FilterCondition compares what is there; what is null has no order.
            if not all(condition.is_met(values) for condition in self.conditions):
                return False
        if not self.words:
            return True
        text = _make_search_text(row)
        return all(word in text for word in self.words)


def _require_known_name(key: str, rows: Sequence[Row], defaults: Mapping[str, Any]) -> None:
    if not rows or key in _OWN or any(key in RowValues(row, defaults) for row in rows):
        return
    names = list(dict.fromkeys([*_OWN, *list_settings(rows), *list_metrics(rows), *defaults]))
    raise EchelonError(Fault(f"no run has {key!r}", suggest_nearest(key, names)))


def _make_search_text(row: Row) -> str:
    settings = (f"{key}={format_setting_value(value)}" for key, value in row["settings"].items())
    tags = (f"#{tag}" for tag in row.get("tags") or ())
    own = (row.get(key) for key in ("name", "experiment", "state", "host", "note"))
    return "\n".join(str(part) for part in (*own, *tags, *settings) if part).lower()


def sort_rows(
    rows: Iterable[Row], key: str, is_reversed: bool, defaults: Mapping[str, Any]
) -> list[Row]:
    """Return rows in the order of `echelon runs --sort KEY`; of equal ones the newest first."""
    newest = sorted(rows, key=lambda row: (row.get("started") or 0.0, row["name"]), reverse=True)
    if key not in ("when", "age"):
        newest.sort(key=lambda row: RowValues(row, defaults).get_sort_key(key))
    return newest[::-1] if is_reversed else newest


def list_settings(rows: Iterable[Row]) -> list[str]:
    """Return the names of the settings that any of the rows says."""
    return sorted({key for row in rows for key in row["settings"]})


def list_metrics(rows: Iterable[Row]) -> list[str]:
    """Return the names of the metrics of rows: the loss first, then what was evaluated, then the
    others, those of speed last."""
    names = {name for row in rows for name in row["metrics"]}
    return sorted(
        names,
        key=lambda n: (n != "loss", n in SPEED_METRICS, n == "lr", not n.startswith("eval_"), n),
    )


def find_differing_settings(rows: Sequence[Row], defaults: Mapping[str, Any]) -> list[str]:
    """Return the settings in which runs of one experiment differ, seeds last."""
    seen: dict[Any, tuple[Counter[str], dict[str, Any]]] = {}
    sizes: Counter[Any] = Counter()
    differing: set[str] = set()
    for row in rows:
        if row.get("state") == "broken":
            continue
        experiment = row.get("experiment")
        sizes[experiment] += 1
        counts, values = seen.setdefault(experiment, (Counter(), {}))
        for key, value in row["settings"].items():
            counts[key] += 1
            if values.setdefault(key, value) != value:
                differing.add(key)
    for experiment, (counts, values) in seen.items():
        differing.update(
            key
            for key, count in counts.items()
            if count < sizes[experiment] and values[key] != defaults.get(key)
        )
    found = [key for key in differing if is_relevant_setting(key)]
    return sorted(found, key=lambda key: (key.rpartition(".")[2] == "seed", "." in key, key))


# --- columns ---


class RowColumn:
    """A column of the table: its title, and what its cells say of a run and of a group."""

    def __init__(self, key: str, rows: Sequence[Row], defaults: Mapping[str, Any]) -> None:
        self.key = key
        self._defaults = defaults
        names = {row.get("best_name") for row in rows if row.get("best") is not None}
        self._shared_best = next(iter(names)) if key == "best" and len(names) == 1 else None
        bare = key.removeprefix("trainer.")
        self.title = _TITLES.get(key, bare.upper() if key in _OWN else bare)
        if self._shared_best:
            self.title = f"BEST {self._shared_best}"
        self.is_right_aligned = key not in _LEFT_ALIGNED

    def format_cell(self, row: Row) -> str:
        """Return what the cell of a run says."""
        key = self.key
        if key == "step":
            return format_steps(row)
        if key == "root":
            return str(row["folder"]).rpartition("/")[0].rpartition("/")[2]
        value = RowValues(row, self._defaults).get(key)
        if value is None:
            return "" if key in ("tags", "note") else MISSING
        if key == "age":
            return format_age(value)
        if key == "time":
            return format_duration(value)
        if key in ("when", "started"):
            return format_timestamp(value)
        if key == "best":
            text = format_digits(value) if is_number(value) else str(value)
            return text if self._shared_best else f"{row.get('best_name') or ''} {text}".strip()
        if is_number(value) and RowValues(row, self._defaults).is_metric(key):
            return format_digits(value)
        return format_setting_value(value)

    def format_group_cell(self, rows: Sequence[Row]) -> str:
        """Return what the cell of a group says: of results the mean and the deviation."""
        key = self.key
        if key == "name":
            return ""
        if key == "state":
            return format_states(rows)
        if key in ("tags", "note", "age", "host", "root"):
            return ""
        if key == "step":
            steps = [row.get("step") or 0 for row in rows]
            low, high = min(steps), max(steps)
            return f"{low}" if low == high else f"{low}–{high}"
        if key == "best" and len({row.get("best_name") for row in rows}) > 1:
            return ""
        every = [RowValues(row, self._defaults) for row in rows]
        numbers = [v for each in every if is_number(v := each.get(key))]
        if key in ("best", "time") or any(each.is_metric(key) for each in every):
            return self._format_mean(numbers)
        count = len({str(each.get(key)) for each in every})
        return self.format_cell(rows[0]) if count == 1 else f"{count} values"

    def _format_mean(self, numbers: Sequence[float]) -> str:
        if not numbers:
            return MISSING
        mean = statistics.fmean(numbers)
        if self.key == "time":
            return format_duration(mean)
        spread = f" ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else ""
        return format_digits(mean) + spread


def choose_columns(rows: Sequence[Row], defaults: Mapping[str, Any], roots: int) -> list[str]:
    """Return the columns of the default view, as the page has them: settings that differ, and
    results."""
    settings = find_differing_settings(rows, defaults)[:_MAX_SETTINGS]
    best_names = {f"eval_{row.get('best_name')}" for row in rows}
    counts = Counter(
        key
        for row in rows
        for key in row["metrics"]
        if key not in SPEED_METRICS and key != "lr" and key not in best_names
    )
    metrics = sorted(counts, key=lambda k: (k != "loss", not k.startswith("eval_"), -counts[k], k))[
        :_MAX_METRICS
    ]
    short = (bare if (bare := k.removeprefix("eval_")) not in counts else k for k in metrics)
    is_mixed = len({row.get("experiment") for row in rows}) > 1
    return [
        *("name", "state", "step", "best", *settings),
        *(key for key in short if key not in settings),
        *("time", "age", *(["experiment"] if is_mixed else []), "host"),
        *(["root"] if roots > 1 else []),
        *("tags", "note"),
    ]


def format_steps(row: Row) -> str:
    """Return how far a run is, with the time that is left: ``40/100 1m20s``."""
    step, total = row.get("step"), row.get("total_steps")
    if step is None:
        return MISSING
    if not total or step >= total:
        return f"{step}"
    left = row.get("eta_s")
    eta = f" {format_duration(left)}" if is_active(row) and is_number(left) else ""
    return f"{step}/{total}{eta}"


def format_age(seconds: float) -> str:
    """Return how long ago something was in one unit, so that it seldom changes: ``3m``."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return "<1m"


def format_states(rows: Sequence[Row]) -> str:
    """Return how many runs are in which state: ``20 finished, 3 running``."""
    counts = Counter(str(row.get("state")) for row in rows)
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{count} {state}" for state, count in ordered)
