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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

UNSETTLED = "-"
"""In the place of a signature: read the run again at the next check."""
_SETTLING_NS = 2_000_000_000
"""A file may change again within one tick of its file system's clock, which some count in
seconds."""
_MAX_TEXT = 1000
"""Characters of a value in a row. A page of one run shows all of it."""
_MAX_NAMES = 300
"""Settings or metrics in a row."""
_TRIAL_NAME = re.compile(r"(.+)-\d+", re.DOTALL)
_IRRELEVANT_SETTINGS = ("run.name", "run.dir", "rank", "world_size", "master")


@dataclass(frozen=True)
class RunRowText:
    """A row as the index keeps it."""

    name: str
    """Of the run's folder."""
    signature: str
    """What the folder looked like when it was read; UNSETTLED for a run that must be read again."""
    text: bytes
    """A JSON object that begins with the name."""

    def render(self, root_number: int, folder_prefix: bytes) -> bytes:
        """Return the whole row: with its id, the number of its root and its folder."""
        name, _, rest = self.text.partition(b',"source":')
        bare = name[9:-1]  # of {"name":"…"
        return b'{"id":"%d:%b","root":%d,"folder":"%b%b","name":"%b","source":%b' % (
            *(root_number, bare, root_number, folder_prefix, bare, bare),
            rest,
        )


def make_run_id(root_number: int, name: str) -> str:
    """Return the id of a run: its root's number and its name, as a page can write it."""
    return f"{root_number}:{make_shown_name(name)}"


def make_shown_name(name: str) -> str:
    """Return a name as text; bytes of it that are not UTF-8 become ``\\xff``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def compute_signature(folder: str) -> str:
    """Return what a change of a run folder changes, by three looks and without reading: its
    inode and time, and size and time of the files that grow. All others are replaced, which
    changes the folder's time. UNSETTLED where that happened just now.

    Raises OSError where there is no such folder.
    """
    own = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(own.st_mode):
        raise NotADirectoryError(folder)
    newest_ns = own.st_mtime_ns
    parts = [f"{own.st_ino:x}.{own.st_mtime_ns:x}"]
    for name in ("/metrics.jsonl", "/history.jsonl"):
        try:
            found = os.stat(folder + name)
        except OSError:
            parts.append("0")
            continue
        parts.append(f"{found.st_size:x}.{found.st_mtime_ns:x}")
        newest_ns = max(newest_ns, found.st_mtime_ns)
    is_settled = abs(time.time_ns() - newest_ns) > _SETTLING_NS
    return ".".join(parts) if is_settled else UNSETTLED


@cache
def get_default_settings() -> dict[str, Any]:
    """Return the settings that a run has unless its row says otherwise, flat."""
    from echelon.config.schema import Config, flatten

    flat = flatten(Config().to_dict())
    return {key: value for key, value in flat.items() if key not in _IRRELEVANT_SETTINGS}


def build_row(record: Any, sweeps: Collection[str] = ()) -> dict[str, Any]:
    """Return the row of a run. `sweeps` are the names of the sweeps beside it."""
    from echelon.runs.annotations import read_annotations
    from echelon.runs.curves import choose_best_direction, read_overview
    from echelon.views.run_settings import flatten_settings

    status, overview = record.run_status, read_overview(record)
    annotations = read_annotations(record.run)
    trial = _TRIAL_NAME.fullmatch(record.name)
    metrics = {
        name: [each.last, each.min, each.max, each.count, choose_best_direction(name, record)]
        for name, each in overview.summary.metrics.items()
    }
    return {
        "name": make_shown_name(record.name),
        "source": "echelon",
        "state": record.state,
        "why": _shorten(record.problem or status.note) or None,
        "experiment": _shorten(record.experiment),
        "step": overview.progress.step,
        "total_steps": overview.progress.total_steps,
        "best": overview.best,
        "best_name": _shorten(overview.best_name),
        "best_is": record.best_is,
        "trained_s": _round(overview.trained_s),
        "eta_s": _round(overview.progress.eta_s),
        "started": status.started,
        "updated": _find_last_change(record),
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
        "settings": _select_settings(flatten_settings(record)),
        "metrics": {_shorten(name): each for name, each in list(metrics.items())[:_MAX_NAMES]},
    }


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as JSON. What a file said that is not a number of JSON is null."""
    from echelon.board.request import replace_not_finite

    try:
        text = json.dumps(row, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(replace_not_finite(row), allow_nan=False, separators=(",", ":"))
    return text.encode()


def read_row_text(folder: str, sweeps: Collection[str] = ()) -> RunRowText:
    """Return the row of the run in a folder. Raises OSError where there is no folder."""
    from echelon.runs.record import read_run_records
    from echelon.runs.run_folder import Run

    signature = compute_signature(folder)  # before the files: what changes now changes it
    [record], _ = read_run_records([Run(Path(folder))])
    if record.run_status.is_active:
        signature = UNSETTLED
    return RunRowText(record.name, signature, encode_row(build_row(record, sweeps)))


def _select_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    defaults = get_default_settings()
    found: dict[str, Any] = {}
    for key, value in flat.items():
        if key in _IRRELEVANT_SETTINGS or (key in defaults and defaults[key] == value):
            continue
        if len(found) == _MAX_NAMES:
            break
        found[_shorten(key)] = _shorten_value(value)
    return found


def _shorten_value(value: Any) -> Any:
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, (list, dict)):
        text = json.dumps(value, separators=(",", ":"))
        return value if len(text) <= _MAX_TEXT else _shorten(text)
    return value


def _shorten(text: str | None) -> Any:
    return text if text is None or len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _find_last_change(record: Any) -> float | None:
    """Return when the run last gave a sign of life."""
    updated = record.facts.get_number("updated") or 0.0
    with contextlib.suppress(OSError):
        updated = max(updated, record.run.metrics_file.stat().st_mtime)
    return round(updated, 3) or None
