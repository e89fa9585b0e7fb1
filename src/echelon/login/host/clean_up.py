"""What submissions have left in the project's folder and nobody needs any more goes.

It is looked for at most once in an hour, when a laptop asks for something anyway, for a second or
two and in a process of its own. Nothing is removed that the script of a run names which may still
start or go on, nor the code of a run that is there, be it in the trash.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from echelon.login.host.detached import start_detached
from echelon.login.host.slurm_cache import read_job_states
from echelon.login.host.source_store import RUNS_FOLDER, SourceStore
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import SlurmJobState
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock

EVERY_S = 3600.0
UNUSED_S = 30 * 86400.0
"""How long code is kept that no run refers to: it is sent again in a moment."""
SECRET_UNUSED_S = 600.0
"""Longer than it takes from a secret to the job that reads it."""
_LIMIT_S = 2.0
_TRASH = ".trash"
_NAME = re.compile(r"[0-9a-f]{24,64}")
"""A digest, or the id of a submission, as it stands in a script."""


def clean_up_sometimes(store: SourceStore) -> int | None:
    """Clean up in a process of its own, if that was not done within the last hour; returns its id,
    or None."""
    with contextlib.suppress(OSError):
        if time.time() - _get_stamp(store).stat().st_mtime < EVERY_S:
            return None
    return start_detached(lambda: clean_up(store))


def clean_up(
    store: SourceStore, unused_s: float = UNUSED_S, secret_unused_s: float = SECRET_UNUSED_S
) -> None:
    """Remove what was not needed for so long. What takes too long is continued the next time."""
    lock = FileLock(store.folder / "clean.lock")
    if not lock.try_acquire():
        return
    try:
        position = str((read_json_object(_get_stamp(store)) or {}).get("position", ""))
        write_json_atomically(_get_stamp(store), {"position": position})
        named = _find_names_in_use(store)
        if named is not None:
            _remove_code(store, named, unused_s)
            for file in _list_old(store.folder / "secrets", secret_unused_s):
                if file.name not in named:
                    file.unlink()
        position = _remove_files(store, unused_s, position)
        write_json_atomically(_get_stamp(store), {"position": position})
    finally:
        lock.release()


def _get_stamp(store: SourceStore) -> Path:
    return store.folder / "clean.json"


# --- what is in use ---


def _find_names_in_use(store: SourceStore) -> set[str] | None:
    """Return the digests and ids in the scripts of all runs and sweeps that are not over; None if
    Slurm does not say which these are."""
    runs = [Run(path) for path in _list_folders(store.root / RUNS_FOLDER)]
    open_runs = [run for run in runs if not run.exit_code_file.exists()]
    jobs = {run: run.read_job_id() for run in open_runs}
    answer = read_job_states(store.folder, [job for job in jobs.values() if job])
    if answer["error"]:
        return None
    found: set[str] = set()
    arrays = list((store.root / RUNS_FOLDER).glob(".*.sh"))
    for run, job in jobs.items():
        states = [
            SlurmJobState(*state)
            for other, state in answer["states"].items()
            if other == job or other.partition("_")[0] == job
        ]
        is_new = not job or (not states and _is_younger(run.job_id_file, SECRET_UNUSED_S))
        if is_new or any(state.is_active for state in states):
            scripts = [run.script_file, run.folder / "workers.sh"]
            if not run.script_file.exists():  # a task of an array, whose script is beside the runs
                scripts += arrays
                arrays = []
            found |= _read_names(scripts)
    return found


def _read_names(scripts: Sequence[Path]) -> set[str]:
    names: set[str] = set()
    for script in scripts:
        with contextlib.suppress(OSError):
            names |= set(_NAME.findall(script.read_text(encoding="utf-8", errors="replace")))
    return names


# --- what goes ---


def _remove_code(store: SourceStore, named: set[str], unused_s: float) -> None:
    """Remove trees and versions of Echelon that no run refers to, and first the references of runs
    that are gone."""
    runs = store.root / RUNS_FOLDER
    for folder in ("code", "sweeps"):
        for entry in _list_old(store.folder / folder, unused_s):
            if not any((at / entry.name).exists() for at in (runs, runs / _TRASH)):
                _remove(entry)
    used = {Path(os.readlink(link)).name for link in _list_entries(store.folder / "code")}
    for folder in ("sources", "packages"):
        for tree in _list_old(store.folder / folder, unused_s):
            if tree.name not in used and tree.name not in named:
                _remove(tree)


def _remove_files(store: SourceStore, unused_s: float, position: str) -> str:
    """Remove files that are in no tree any more; returns where to go on the next time."""
    began, folders = time.monotonic(), sorted(_list_folders(store.folder / "files"))
    for folder in [f for f in folders if f.name >= position]:
        if time.monotonic() - began > _LIMIT_S:
            return folder.name
        for file in _list_entries(folder):
            with contextlib.suppress(OSError):
                status = file.lstat()
                # The time of its last change is also that of its last link.
                if status.st_nlink == 1 and time.time() - status.st_ctime >= unused_s:
                    file.unlink()
    return ""


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
        return
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o755)
    shutil.rmtree(path, ignore_errors=True)


def _list_old(folder: Path, age_s: float) -> Iterator[Path]:
    return (path for path in _list_entries(folder) if not _is_younger(path, age_s))


def _is_younger(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime < age_s
    except OSError:
        return True  # gone meanwhile


def _list_entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _list_folders(folder: Path) -> list[Path]:
    return [path for path in _list_entries(folder) if path.is_dir() and not path.is_symlink()]
