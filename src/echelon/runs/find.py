"""Runs found by what a person types: a folder, a name, `latest`, a job id, the name of a group."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from echelon.config.validate import check_run_name
from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.runs.latest import LATEST, read_latest_link
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import CONFIG_FILE, RUN_FILES, SUBMISSION_FILE, Run

_JOB_ID = re.compile(r"\d+(_\d+)?")
_MAX_NAMES = 12
"""Names in a message."""


def list_runs(root: Path, *, include_broken: bool = False) -> list[Run]:
    """Return the runs in a folder by name; one that cannot be listed has none.

    The link `latest` is left out, as it is only another name of a run. A folder that has lost its
    config.json, but holds other files of a run, counts with ``include_broken``.
    """
    signs = RUN_FILES if include_broken else (CONFIG_FILE,)
    with contextlib.suppress(OSError), os.scandir(root.absolute()) as entries:
        paths = sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
        return [Run(p) for p in paths if any((p / sign).exists() for sign in signs)]
    return []


def find_run(where: str, root: str = "runs") -> Run:
    """Return the one run that ``where`` names, as find_runs() does; several are an error."""
    runs = find_runs(where, root)
    if len(runs) > 1:
        names = [run.name for run in runs]
        raise EchelonError(
            Fault(
                f"{where} is the name of {len(runs)} runs",
                f"name one of them: {', '.join(names[:_MAX_NAMES])}"
                + ", …" * (len(names) > _MAX_NAMES),
            )
        )
    return runs[0]


def find_runs(where: str, root: str = "runs") -> list[Run]:
    """Return the runs that ``where`` names, at least one.

    Tried in this order: a folder, the name of a run in ``root`` or `latest`, the id of a Slurm job
    or job array, and the name under which several runs were submitted.
    """
    for folder in _list_candidates(where, root):
        if (folder / CONFIG_FILE).exists():
            return [Run(folder.resolve())]
    if runs := [*_find_by_job(where, Path(root)), *_find_by_group(where, Path(root))]:
        return runs
    raise make_unknown_run_error(where, root)


def find_run_including_broken(where: str, root: str) -> Run:
    """Return the run of that folder or name, or `latest`, even if it has lost its config.json."""
    for folder in _list_candidates(where, root):
        if any((folder / sign).exists() for sign in RUN_FILES):
            return Run(folder.resolve())
    raise make_unknown_run_error(where, root)


def _list_candidates(where: str, root: str) -> list[Path]:
    """Return the folders that these words may mean."""
    if where == LATEST and not Path(where).exists():
        latest = find_latest_run(Path(root))
        return [] if latest is None else [latest.folder]
    return [Path(where), Path(root) / where]


def find_latest_run(root: Path) -> Run | None:
    """Return the run that `latest` means: the newest one that is queued, or running and still
    before its first step, if it came after the run that trained last; else that one."""
    link = read_latest_link(root)
    since = (root / LATEST).lstat().st_mtime_ns if link is not None else 0
    runs = list_runs(root)
    newer, _ = read_run_records([run for run in runs if _get_change_time(run) > since])
    for record in newer:
        if record.run_status.is_active and not record.has_trained:
            return record.run
    if link is not None and all(record.has_trained for record in read_run_records([link])[0]):
        return link
    # Without a link, or with one of an earlier version of Echelon, which had other rules.
    records, _ = read_run_records(runs)
    return next((record.run for record in records if record.has_trained), None)


def _get_change_time(run: Run) -> int:
    """Return when the status of the run was written last; 0 without one."""
    with contextlib.suppress(OSError):
        return run.status_file.stat().st_mtime_ns
    return 0


def make_unknown_run_error(where: str, root: str) -> EchelonError:
    """Return the error for a run that is not there, with the name that was probably meant."""
    names = [run.name for run in list_runs(Path(root), include_broken=True)]
    if where == LATEST and names:
        return EchelonError(
            Fault(
                f"no run in {Path(root).absolute()} has trained yet, so none is `latest`",
                "`echelon runs --all` lists those that ended before their first step",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    known = [*names, LATEST] if names else []
    return EchelonError(
        Fault(
            f"no run {where!r} here or in {Path(root).absolute()}",
            suggest_nearest(where, known) if known else "start one with `echelon train`",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def find_numbered_runs(name: str, root: Path) -> list[Run]:
    """Return NAME-0, NAME-1, … by number, 9 before 10."""
    folders = [file.parent for file in root.glob(f"{name}-*/{CONFIG_FILE}")]
    numbers = {folder: folder.name.removeprefix(f"{name}-") for folder in folders}
    numbered = [folder for folder, number in numbers.items() if number.isdecimal()]
    return [Run(folder.resolve()) for folder in sorted(numbered, key=lambda f: int(numbers[f]))]


def _find_by_job(job: str, root: Path) -> Iterator[Run]:
    """Yield the run of a job; for the id of a job array, the runs of all its tasks."""
    if not _JOB_ID.fullmatch(job):
        return
    for file in sorted(root.glob("*/job")):
        own = Run(file.parent).read_job_id()
        if not file.parent.is_symlink() and job in (own, own.partition("_")[0]):
            yield Run(file.parent.resolve())


def _find_by_group(name: str, root: Path) -> list[Run]:
    """Return the runs that were submitted together under a name.

    A run that was submitted alone has a submission file of its own and is not one of them, even if
    its name fits.
    """
    group_files = (root / name / SUBMISSION_FILE, Run(root / f"{name}-0").array_file)
    if check_run_name(name) or not any(file.exists() for file in group_files):
        return []
    runs = find_numbered_runs(name, root)
    return [run for run in runs if not (run.folder / SUBMISSION_FILE).exists()]
