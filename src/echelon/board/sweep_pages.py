"""Sweeps: their trials, the best so far, what matters and what runs where.

What a sweep is, is known to the package `sweep` alone. The command gives the board a function that
reads one (`Board.read_sweep`); it takes a while, so what it said is kept until a file of the sweep
changes. A sweep of another user is shown by its runs, because reading it takes the sweep's lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.board.request import NotFoundError, Request, Response, Route, json_response
from echelon.board.run_index import is_plain_name, is_run_folder
from echelon.errors import EchelonError

if TYPE_CHECKING:
    from echelon.board.server import Board

_SETTINGS_FILES = ("sweep.json", "server.json")
_CHANGING_FILES = (".", "sweep.json", "server.json", "journal.log", "leases")
"""Their times and sizes say whether anything has changed."""
_LIST_WAIT_S = 1.0
"""How long a list waits for sweeps that are read; those that take longer say so."""
_IMPORTANCE_EVERY_S = 20.0
_DATABASE_EVERY_S = 10.0
_FINAL_STATES = ("finished", "pruned", "failed")


class SweepKey(NamedTuple):
    """A sweep in one of the roots."""

    root: int
    folder: Path

    @property
    def id(self) -> str:
        return f"{self.root}:{self.folder.name}"


class SweepReading(NamedTuple):
    """What was read of a sweep."""

    signature: str
    report: dict[str, Any]
    importance_of: str = ""
    """The signature when importance was computed."""
    importance_at: float = -math.inf


class SweepReports:
    """Reads sweeps, each one at a time, and keeps what was read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[SweepKey, SweepReading] = {}
        self._reading: dict[SweepKey, threading.Lock] = {}

    def read(self, board: Board, key: SweepKey, with_importance: bool) -> dict[str, Any]:
        """Return the report of a sweep, from what is known if nothing has changed. Importance is of
        many trials and hardly changes with one more, so it may be some seconds older."""
        with self._lock:
            lock = self._reading.setdefault(key, threading.Lock())
        with lock:
            signature, now = _compute_signature(key.folder), time.monotonic()
            known = self._known.get(key, SweepReading("", {}))
            computes = (
                with_importance
                and known.importance_of != signature
                and now - known.importance_at > _IMPORTANCE_EVERY_S
            )
            if known.signature == signature and not computes:
                return known.report
            report = _read_report(board, key, computes)
            if computes:
                known = known._replace(importance_of=signature, importance_at=now)
            else:
                report = report | {"importance": known.report.get("importance", {})}
            self._known[key] = known._replace(signature=signature, report=report)
            return report


_reports = SweepReports()


def _compute_signature(folder: Path) -> str:
    parts = []
    for name in _CHANGING_FILES:
        with contextlib.suppress(OSError):
            found = (folder / name).stat()
            parts.append(f"{name}.{found.st_size}.{found.st_mtime_ns}")
    if not (folder / "journal.log").exists():
        parts.append(f"{time.monotonic() // _DATABASE_EVERY_S:g}")  # results are elsewhere
    return " ".join(parts)


def _read_report(board: Board, key: SweepKey, with_importance: bool) -> dict[str, Any]:
    """Return the report as `echelon sweep show --json` prints it, with ``error`` where it cannot be
    read; then the trials are those of which there are runs."""
    error = "it belongs to another user, so only its runs are read"
    if board.read_sweep is None:
        error = "this board reads the runs of sweeps alone"
    elif key.folder.stat().st_uid == os.geteuid():
        try:
            return board.read_sweep(key.folder, with_importance)
        except EchelonError as fault:
            error = "; ".join(each.what for each in fault.faults)
        except (OSError, ValueError, KeyError, TypeError) as fault:
            error = f"its files are damaged: {fault}"
    return _make_report_of_runs(board, key) | {"error": error}


def _make_report_of_runs(board: Board, key: SweepKey) -> dict[str, Any]:
    settings = _read_settings(key.folder)
    metric = settings.get("metric") if isinstance(settings.get("metric"), dict) else {}
    assert isinstance(metric, dict)
    name, goal = str(metric.get("name") or ""), str(metric.get("goal") or "minimize")
    sign = -1.0 if goal == "maximize" else 1.0
    trials = []
    for row in _list_trial_rows(board, key):
        state = row["state"]
        trials.append(
            {
                "trial": int(row["name"].rpartition("-")[2]),
                "run": row["name"],
                "state": state if state in (*_FINAL_STATES, "running") else "waiting",
                "value": row.get("best"),
                "parameters": row.get("settings") or {},
                "evaluations": None,
                "cause": row.get("why"),
            }
        )
    trials.sort(key=lambda trial: int(trial["trial"]))
    ended = [t for t in trials if t["state"] == "finished" and t["value"] is not None]
    return {
        "metric": name,
        "goal": goal,
        "run_cap": settings.get("run_cap"),
        "ending": None,
        "best": min(ended, key=lambda trial: sign * trial["value"], default=None),
        "importance": {},
        "trials": trials,
    }


def _read_settings(folder: Path) -> dict[str, Any]:
    from echelon.utils.files import read_json_object

    for name in _SETTINGS_FILES:
        if (data := read_json_object(folder / name)) is not None:
            return data
    return {}


def _list_trial_rows(board: Board, key: SweepKey) -> list[dict[str, Any]]:
    prefix = f"{key.folder.name}-"
    found = []
    for row in board.index.list_rows():
        if row.root == key.root:
            name = os.path.basename(row.folder)
            if name.startswith(prefix) and name[len(prefix) :].isdecimal():
                found.append(json.loads(row.text))
    return found


# --- handlers ---


def show_sweeps(request: Request) -> Response:
    """``GET /api/sweeps``: all sweeps of the roots, those that changed last first.

    Answer::

        {"sweeps": [{"id", "name", "root", "folder", "engine": "embedded|wandb", "metric",
             "direction": "minimize|maximize", "run_cap", "changed": seconds since 1970,
             "counts": {state: n, …} (finished, pruned, failed, running, waiting),
             "best": {a trial as in /api/sweep/{id}} or null, "ending": why it ended early or null,
             "error": text or null, "loading": true while it is read for the first time}]}
    """
    board = request.board
    keys = _list_sweeps(board)
    readings: dict[SweepKey, Future[dict[str, Any]]] = {
        key: board.submit(partial(_reports.read, board, key, False)) for key in keys
    }
    wait_for(readings.values(), timeout=_LIST_WAIT_S)
    sweeps: list[dict[str, Any]] = []
    for key in keys:
        summary: dict[str, Any] = {
            "id": key.id,
            "name": key.folder.name,
            "root": key.root,
            "folder": str(key.folder),
            "engine": "wandb" if (key.folder / "server.json").exists() else "embedded",
            "changed": _find_last_change(key.folder),
        }
        try:
            report = readings[key].result(timeout=0)
            sweeps.append(summary | _summarize(key, report) | {"loading": False})
        except FutureTimeoutError:
            unknown = dict.fromkeys(("metric", "direction", "run_cap", "best", "ending", "error"))
            sweeps.append(summary | unknown | {"counts": {}, "loading": True})
        except OSError:
            continue  # removed meanwhile
    sweeps.sort(key=lambda sweep: -sweep["changed"])
    return json_response({"sweeps": sweeps})


def _list_sweeps(board: Board) -> list[SweepKey]:
    found = []
    for number, root in enumerate(board.roots):
        for file in _SETTINGS_FILES:
            with contextlib.suppress(OSError):
                found += [
                    SweepKey(number, path.parent)
                    for path in root.glob(f"*/{file}")
                    if not path.parent.is_symlink() and not is_run_folder(str(path.parent))
                ]
    return list(dict.fromkeys(found))


def _find_last_change(folder: Path) -> float:
    times = [0.0]
    for name in _CHANGING_FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _summarize(key: SweepKey, report: dict[str, Any]) -> dict[str, Any]:
    states = [trial["state"] for trial in report["trials"]]
    best = report.get("best")
    return {
        "metric": report["metric"],
        "direction": report["goal"],
        "run_cap": report.get("run_cap"),
        "counts": {state: states.count(state) for state in dict.fromkeys(states)},
        "best": None if best is None else _convert_trial(key, best),
        "ending": report.get("ending"),
        "error": report.get("error"),
    }


def show_sweep(request: Request) -> Response:
    """``GET /api/sweep/{id}``: one sweep with all its trials.

    Answer: the fields of ``/api/sweeps``, and::

        {"trials": [{"number", "state": "finished|pruned|failed|running|waiting", "value",
             "parameters": {name: value}, "evaluations", "cause", "run": id of its run or null,
             "run_name", "host", "step", "total_steps", "trained_s", "started"}],
         "parameters": [names], "importance": {name: part of 1}, the largest first,
         "history": [[number, value, best so far] …] of trials with a value, by number}

    ``host`` to ``started`` are those of the run's row; null without one.
    """
    board = request.board
    key = _find_sweep(board, request.path_values["id"])
    report = _reports.read(board, key, True)
    rows = {row["name"]: row for row in _list_trial_rows(board, key)}
    trials = [_convert_trial(key, trial) | _describe_run(rows, trial) for trial in report["trials"]]
    sign = -1.0 if report["goal"] == "maximize" else 1.0
    history: list[list[float]] = []
    for trial in sorted(trials, key=lambda trial: int(trial["number"])):
        value = trial["value"]
        if value is not None and trial["state"] in ("finished", "pruned"):
            best = min(value, history[-1][2] if history else value, key=lambda v: sign * v)
            history.append([trial["number"], value, best])
    names = dict.fromkeys(name for trial in trials for name in trial["parameters"])
    return json_response(
        {
            "id": key.id,
            "name": key.folder.name,
            "root": key.root,
            "folder": str(key.folder),
            "engine": "wandb" if (key.folder / "server.json").exists() else "embedded",
            "changed": _find_last_change(key.folder),
            "loading": False,
            **_summarize(key, report),
            "trials": trials,
            "parameters": list(names),
            "importance": report.get("importance") or {},
            "history": history,
        }
    )


def _find_sweep(board: Board, sweep_id: str) -> SweepKey:
    number, _, name = sweep_id.partition(":")
    if number.isdecimal() and int(number) < len(board.roots) and is_plain_name(name):
        folder = board.roots[int(number)] / name
        is_sweep = any((folder / file).is_file() for file in _SETTINGS_FILES)
        if is_sweep and not folder.is_symlink():
            return SweepKey(int(number), folder)
    raise NotFoundError(f"there is no sweep {sweep_id[:200]!r}", "see the list of sweeps")


def _convert_trial(key: SweepKey, trial: dict[str, Any]) -> dict[str, Any]:
    name = str(trial.get("run") or "")
    has_run = is_plain_name(name) and is_run_folder(str(key.folder.with_name(name)))
    return {
        "number": trial["trial"],
        "state": trial["state"],
        "value": trial["value"],
        "parameters": trial["parameters"],
        "evaluations": trial.get("evaluations"),
        "cause": trial.get("cause"),
        "run": f"{key.root}:{name}" if has_run else None,
        "run_name": name,
    }


def _describe_run(rows: dict[str, dict[str, Any]], trial: dict[str, Any]) -> dict[str, Any]:
    row = rows.get(str(trial.get("run")), {})
    known = ("host", "step", "total_steps", "trained_s", "started")
    return {name: row.get(name) for name in known}


ROUTES: list[Route] = [
    ("GET", "/api/sweeps", show_sweeps),
    ("GET", "/api/sweep/{id}", show_sweep),
]
