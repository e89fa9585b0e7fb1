"""One run as a row of the board's table: JSON text that is made once and served many times.

A row is read through the same model as `echelon runs`, `jobs` and `show` read a run. It does not
say in which root its folder is, so that the index of a root holds wherever the root is mounted:
`RunRowText.render` adds that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from echelon.runs.annotations import Annotations
    from echelon.runs.curves import RunOverview
    from echelon.runs.metrics_summary import MetricsSummary
    from echelon.runs.record import RunRecord
    from echelon.runs.slurm_queue import SlurmQueueAnswer

    AskSlurm = Callable[[Sequence[str]], SlurmQueueAnswer]

UNSETTLED = "-"
"""In the place of a signature: read the run again at the next look."""
_SETTLING_NS = 2_000_000_000
"""A file may change again within one tick of its file system's clock, which some count in
seconds."""
_READ_FILES = frozenset(
    (
        *("config.json", "status.json", "metrics.jsonl", "summary.json", "history.jsonl"),
        *("annotations.json", "exit", "job", "command.json", "start.json", "call.json"),
        *("wandb.json", "mirror.json", "submission.json", "bad_samples.jsonl", "foreign.json"),
        *("cancelled", "archived", ".membership", ".writer", ".nodes", "origin.json", ".origin"),
    )
)
_MAX_TEXT = 1000
"""Characters of a value in a row. The page of one run shows all of it."""
_MAX_NAMES = 300
"""Settings or metrics in a row."""
_RECENT_LINES = 16
_TRIAL_NAME = re.compile(r"(.+)-\d+", re.DOTALL)
_IRRELEVANT_SETTINGS = ("run.name", "run.dir", "rank", "world_size", "master")


class RunRowText(NamedTuple):
    """A row as the index keeps it."""

    name: str
    """Of the run's folder."""
    signature: str
    """What the folder looked like when it was read; UNSETTLED for a run that must be read again."""
    text: bytes
    """A JSON object that begins with the name and the source."""

    def render(self, root_number: int, folder_prefix: bytes) -> bytes:
        """Return the whole row: with its id, the number of its root and its folder."""
        name = find_name_text(self.text)
        return b'{"id":"%d:%b","root":%d,"folder":"%b%b",%b' % (
            *(root_number, name, root_number, folder_prefix, name),
            self.text[1:],
        )


def find_name_text(row: bytes) -> bytes:
    """Return the name in the text of a row, as JSON without quotes. Raises ValueError without."""
    # A quote within the name has a backslash before it, so this is the end of the name.
    return row[9 : row.index(b'","source":')]


def make_run_id(root_number: int, name: str) -> str:
    """Return the id of a run: its root's number and its name, as a page can write it."""
    return f"{root_number}:{make_shown_name(name)}"


def make_shown_name(name: str) -> str:
    """Return a name as text; bytes of it that are not UTF-8 become ``\\xff``."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


# --- what a folder looks like from outside ---


def compute_signature(folder: str) -> tuple[str, int]:
    """Return what a change of a run folder changes, by three looks and without reading, and the
    time of its newest change in ns.

    It has the folder's inode and time, and size and time of the files that grow. All others are
    replaced, which changes the folder's time. It is UNSETTLED where that happened just now. Raises
    OSError where there is no such folder.
    """
    own = os.lstat(folder)
    if not stat.S_ISDIR(own.st_mode):
        raise NotADirectoryError(folder)
    newest_ns = own.st_mtime_ns
    text = f"{own.st_ino:x}.{own.st_mtime_ns:x}"
    for name in ("/metrics.jsonl", "/history.jsonl"):
        try:
            found = os.lstat(folder + name)
        except OSError:
            text += ".0"
            continue
        text += f".{found.st_size:x}.{found.st_mtime_ns:x}"
        newest_ns = max(newest_ns, found.st_mtime_ns)
    is_settled = abs(time.time_ns() - newest_ns) > _SETTLING_NS
    return text if is_settled else UNSETTLED, newest_ns


def find_odd_file(folder: str) -> str | None:
    """Return why the files of a run are not to be read: one is a link to what is not in its root,
    or no plain file, such as a pipe, which would be waited for. None where all are sound.

    Somebody else may have put it there, to have a file of the reader's shown to others.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name not in _READ_FILES or entry.is_file(follow_symlinks=False):
                continue
            if not entry.is_symlink():
                return f"{entry.name} is not a plain file"
            root = os.path.realpath(os.path.dirname(folder)).rstrip("/") + "/"
            if not os.path.realpath(entry.path).startswith(root):
                return f"{entry.name} is a link that leads elsewhere"
            if os.path.exists(entry.path) and not entry.is_file():
                return f"{entry.name} is a link to what is not a plain file"
    return None


# --- a row ---


def read_row_text(
    folder: str, sweeps: Collection[str] = (), ask_slurm: AskSlurm | None = None
) -> RunRowText:
    """Return the row of the run in a folder. `sweeps` are the names of the sweeps beside it.

    Without `ask_slurm` nothing is asked, and a job of Slurm has the state that it last wrote.
    Raises OSError where there is no folder.
    """
    return LiveRow(folder, sweeps, ask_slurm).read(keeps_summary=True)


def answer_nothing(jobs: Sequence[str]) -> SlurmQueueAnswer:
    """Answer for Slurm without asking it."""
    from echelon.runs.slurm_queue import SlurmQueueAnswer

    return SlurmQueueAnswer({}, "it was not asked")


class LiveRow:
    """The row of one run, which costs little while only its metrics grow.

    The summary of its metrics is kept in memory: a line that was added is parsed once.
    """

    def __init__(
        self, folder: str, sweeps: Collection[str], ask_slurm: AskSlurm | None = None
    ) -> None:
        self.folder = folder
        self._sweeps = sweeps
        self._ask_slurm = ask_slurm or answer_nothing
        self._row: dict[str, Any] = {}
        self._summary: MetricsSummary | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_LINES)
        self._next_look = 0.0

    def read(self, *, keeps_summary: bool = False) -> RunRowText:
        """Read everything and return the row. Raises OSError where there is no folder.

        ``keeps_summary`` is for a row that is read once: a long summary that was missing is written
        for the next reader.
        """
        from echelon.runs.annotations import read_annotations
        from echelon.runs.curves import derive_overview, read_record_history
        from echelon.runs.metrics_file import MetricsFollower, read_recent_metrics
        from echelon.runs.metrics_summary import load_summary, read_summary
        from echelon.runs.record import read_run_records
        from echelon.runs.run_folder import Run

        signature, _ = compute_signature(self.folder)  # first: what changes now, changes it
        run = Run(Path(self.folder))
        if problem := find_odd_file(self.folder):
            self._row = _make_broken_row(run.name, problem)
            return RunRowText(run.name, signature, encode_row(self._row))
        [self._record], _ = read_run_records([run], self._ask_slurm)
        is_running = self._record.run_status.state == "running"
        self._history = read_record_history(self._record)
        if keeps_summary:
            self._summary = read_summary(run)
            lines = read_recent_metrics(run.metrics_file) if is_running else []
        else:
            if self._summary is None:
                self._summary = load_summary(run)
                offset, mark = self._summary.offset, self._summary.mark
                self._follower = MetricsFollower(run.metrics_file, offset, mark)
                self._recent.extend(read_recent_metrics(run.metrics_file)[-_RECENT_LINES:])
            else:
                self._take_new_lines()
            self._take_new_lines()
            lines = list(self._recent) if is_running else []
        overview = derive_overview(self._record, self._summary, self._history, lines)
        self._row = build_row(self._record, overview, read_annotations(run), self._sweeps)
        if self._record.run_status.is_active:
            signature = UNSETTLED
        return RunRowText(run.name, signature, encode_row(self._row))

    def read_growth(self) -> RunRowText | None:
        """Return the row with the metrics that were added since the last look; None if there are
        none. Nothing else is read."""
        from echelon.runs.curves import derive_overview

        if self._summary is None:
            return self.read()
        if not (names := self._take_new_lines()):
            return None
        is_running = self._record.run_status.state == "running"
        lines = self._recent if is_running else ()
        overview = derive_overview(self._record, self._summary, self._history, tuple(lines))
        self._row.update(_describe_progress(self._record, overview))
        metrics = self._row["metrics"]
        for name in names:
            if (each := self._summary.metrics.get(name)) is None:
                continue
            if (known := metrics.get(name)) is not None:
                known[:4] = each.last, each.min, each.max, each.count
            elif len(metrics) < _MAX_NAMES and len(name) <= _MAX_TEXT:
                metrics[name] = _describe_metric(name, each, self._record)
        return RunRowText(self._record.name, UNSETTLED, encode_row(self._row))

    def has_other_state(self) -> bool:
        """Return whether the row must be read again though no file has changed: its process is
        gone, its job has another state, or it changed last so shortly ago that it was not clear
        whether all was seen."""
        from echelon.runs.status import derive_statuses

        if self._summary is None or not self._record.run_status.is_active:
            return True
        [status], _ = derive_statuses([self._record.facts], self._ask_slurm)
        return status != self._record.run_status

    def is_due(self, now: float) -> bool:
        """Return whether has_other_state() is to be asked."""
        return now >= self._next_look

    def wait_until(self, moment: float) -> None:
        """Set when the run is due next, by the monotonic clock."""
        self._next_look = moment

    def _take_new_lines(self) -> set[str]:
        """Add what was appended to the metrics, and return the names in it."""
        from echelon.runs.metrics_file import is_number
        from echelon.runs.metrics_summary import MetricsSummary

        assert self._summary is not None
        lines, is_new = self._follower.read_new_lines()
        if is_new:
            self._summary = MetricsSummary()
            self._recent.clear()
        names: set[str] = set()
        for line in lines:
            self._summary.add(line)
            names.update(line)
            if is_number(line.get("step")) and is_number(line.get("time")):
                self._recent.append(line)
        return names


def build_row(
    record: RunRecord, overview: RunOverview, annotations: Annotations, sweeps: Collection[str]
) -> dict[str, Any]:
    """Return the row of a run, without its id, root and folder."""
    from echelon.views.run_settings import flatten_changed_settings

    status, trial = record.run_status, _TRIAL_NAME.fullmatch(record.name)
    settings = flatten_changed_settings(record)
    metrics = overview.summary.metrics
    return {
        "name": make_shown_name(record.name),
        "source": "echelon",
        "state": record.state,
        "why": _shorten(record.problem or status.note) or None,
        "experiment": _shorten(record.experiment),
        **_describe_progress(record, overview),
        "best_is": record.best_is,
        "started": status.started,
        "launcher": _shorten(status.launcher),
        "host": _shorten(status.host),
        "job": _shorten(status.job),
        "nodes": status.nodes,
        "processes": status.world,
        "tags": [_shorten(tag) for tag in annotations.tags[:_MAX_NAMES]],
        "note": _shorten(annotations.note),
        "archived": record.is_archived,
        "early": record.ended_before_step_1,
        "sweep": _shorten(trial[1]) if trial and trial[1] in sweeps else None,
        "settings": _select_settings(settings),
        "metrics": {
            name: _describe_metric(name, metrics[name], record)
            for name in list(metrics)[:_MAX_NAMES]
            if len(name) <= _MAX_TEXT
        },
    }


def _describe_progress(record: RunRecord, overview: RunOverview) -> dict[str, Any]:
    """Return the part of a row that its metrics change."""
    return {
        "step": overview.progress.step,
        "total_steps": overview.progress.total_steps,
        "best": overview.best,
        "best_name": _shorten(overview.best_name),
        "trained_s": _round(overview.trained_s),
        "eta_s": _round(overview.progress.eta_s),
        "updated": _find_last_change(record),
    }


def _describe_metric(name: str, metric: Any, record: RunRecord) -> list[Any]:
    from echelon.runs.curves import choose_best_direction

    numbers = (shorten_number(each) for each in (metric.last, metric.min, metric.max))
    return [*numbers, metric.count, choose_best_direction(name, record)]


def _make_broken_row(name: str, why: str) -> dict[str, Any]:
    nothing = dict.fromkeys(
        (
            *("step", "total_steps", "best", "best_name", "best_is", "trained_s", "eta_s"),
            *("started", "updated", "launcher", "host", "job", "nodes", "processes", "sweep"),
        )
    )
    return {
        **{"name": make_shown_name(name), "source": "echelon", "state": "broken", "why": why},
        **{"experiment": "–", **nothing, "tags": [], "note": "", "archived": False},
        **{"early": False, "settings": {}, "metrics": {}},
    }


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as JSON. What a file said that is not a number of JSON is null."""
    try:
        return _encode(row).encode()
    except ValueError:
        from echelon.board.request import replace_not_finite

        return _encode(replace_not_finite(row)).encode()


_encode = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


def get_default_settings() -> dict[str, Any]:
    """Return the settings that a run has unless its row says otherwise, flat."""
    from echelon.views import run_settings

    flat = run_settings.get_default_settings()
    return {key: value for key, value in flat.items() if key not in _IRRELEVANT_SETTINGS}


def _select_settings(changed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _shorten(key): _shorten_value(changed[key])
        for key in [key for key in changed if key not in _IRRELEVANT_SETTINGS][:_MAX_NAMES]
    }


def _shorten_value(value: Any) -> Any:
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, (list, dict)):
        text = json.dumps(value, separators=(",", ":"))
        return value if len(text) <= _MAX_TEXT else _shorten(text)
    return value if not isinstance(value, int) or abs(value) < 1 << 53 else _shorten(str(value))


def _shorten(text: str | None) -> Any:
    return text if text is None or len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def shorten_number(value: float) -> float:
    """Return a number with as many digits as a value of float32 has: a table shows fewer, and the
    rows of 10,000 runs are half as long."""
    return value if isinstance(value, int) else float(f"{value:.8g}")


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _find_last_change(record: RunRecord) -> float | None:
    """Return when the run last gave a sign of life."""
    updated = record.facts.get_number("updated") or 0.0
    with contextlib.suppress(OSError):
        updated = max(updated, os.lstat(f"{record.run_status.folder}/metrics.jsonl").st_mtime)
    return round(updated, 3) or None
