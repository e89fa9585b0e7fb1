"""What the folder of a run says, read so that nothing in it can make a listing fail.

A folder may be half-copied, cut short by a full disk, or written by a later version. What cannot
be read is missing, and a folder without a readable configuration says why it is broken.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from echelon.config import bundled_experiments
from echelon.errors import EchelonError, Exit, Fault, suggest_nearest
from echelon.jobs.status import RunStatus, read_run_statuses
from echelon.runs.run_folder import Run, get_short_subject
from echelon.utils.os_errors import describe_os_error

_RUN_FILES = ("config.json", "status.json", "metrics.jsonl")
_MAX_FLOAT = sys.float_info.max
_STATES_WITH_BEST = ("finished", "preempted")
"""States that are written together with the best value."""


@dataclass(frozen=True)
class RunRecord:
    run: Run
    config: dict[str, Any]
    """As it is in the file: a later version's settings are settings too."""
    status: dict[str, Any]
    run_status: RunStatus
    problem: str
    """Why the folder cannot be read as a run; empty for a sound one."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def state(self) -> str:
        return "broken" if self.problem else self.run_status.state

    @property
    def entry(self) -> str:
        return str(self.get_section("experiment").get("entry") or "")

    @property
    def program(self) -> list[str]:
        words = self.config.get("program")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def experiment(self) -> str:
        """In a word; with its function when that is its own, and not simply `experiment`."""
        if not self.entry and not self.program:
            return "–"
        function = self.entry.rpartition(":")[2]
        plain = function in ("", "experiment") or self.entry in bundled_experiments.list_entries()
        return get_short_subject(self.entry, self.program) + ("" if plain else f":{function}")

    @property
    def best_name(self) -> str:
        return str(self.get_section("trainer").get("best") or "loss")

    @property
    def best_is(self) -> str:
        return "max" if self.get_section("trainer").get("best_is") == "max" else "min"

    @property
    def best(self) -> float | None:
        """The best evaluated value, where the status holds it."""
        value = self.status.get("best")
        return value if self.status.get("state") in _STATES_WITH_BEST and is_number(value) else None

    @property
    def start_times(self) -> list[float]:
        """When it was begun or went on, as far as the status knows: the last time, and each of a
        batch job."""
        jobs = self.status.get("starts")
        noted = jobs if isinstance(jobs, list) else []
        times = [job.get("time") for job in noted if isinstance(job, dict)]
        return [float(t) for t in (*times, self.status.get("since")) if is_number(t)]

    def get_time(self, key: str) -> float | None:
        value = self.status.get(key)
        return value if is_number(value) else None

    def get_count(self, key: str) -> int | None:
        value = self.status.get(key)
        return int(value) if is_number(value) and isinstance(value, int) else None

    def get_section(self, name: str) -> dict[str, Any]:
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}


def is_number(value: object) -> TypeGuard[float]:
    """JSON has true and integers without end, Python's also has NaN; none can be drawn."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT


def read_records(runs: Iterable[Run]) -> tuple[list[RunRecord], str]:
    """Newest first, and why Slurm is silent, if it is."""
    runs_by_folder = {str(run.folder): run for run in runs}
    standings, silence = read_run_statuses(runs_by_folder.values())
    return [_read_record(runs_by_folder[s.folder], s) for s in standings], silence


def list_run_folders(root: Path) -> list[Run]:
    """Whatever looks like a run, sound or broken; `latest` is only another name."""
    with contextlib.suppress(OSError), os.scandir(root.absolute()) as entries:
        paths = sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
        return [Run(p) for p in paths if any((p / sign).exists() for sign in _RUN_FILES)]
    return []


def find_run_folder(where: str, root: str) -> Run:
    """A run by path, by name, or `latest`; a broken one too."""
    for folder in (Path(where), Path(root) / where):
        if any((folder / sign).exists() for sign in _RUN_FILES):
            return Run(folder.resolve())
    raise make_unknown_run_error(where, root)


def make_unknown_run_error(where: str, root: str) -> EchelonError:
    found = [run.name for run in list_run_folders(Path(root))]
    known = [*found, "latest"] if found else []
    return EchelonError(
        Fault(
            f"no run {where!r} here or in {Path(root).absolute()}",
            suggest_nearest(where, known) if known else "start one with `echelon train`",
        ),
        exit=Exit.NOT_FOUND,
    )


def _read_record(run: Run, standing: RunStatus) -> RunRecord:
    config, broken = _read_config(run)
    return RunRecord(run, config, run.read_status(), standing, broken)


def _read_config(run: Run) -> tuple[dict[str, Any], str]:
    try:
        loaded = json.loads(run.config_file.read_bytes())
    except FileNotFoundError:
        return {}, "config.json is missing"
    except OSError as error:
        return {}, f"config.json: {describe_os_error(error)}"
    except (ValueError, RecursionError):
        return {}, "config.json is damaged"
    return (loaded, "") if isinstance(loaded, dict) else ({}, "config.json is damaged")
