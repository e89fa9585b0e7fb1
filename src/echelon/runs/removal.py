"""Taking runs out of sight: into the trash of their folder, for good, or into the archive.

The trash is a folder `.trash` beside the runs, on the same file system: a run goes there and comes
back by a rename, however large it is. Nothing is deleted before the trash is emptied. An archived
run stays where it is, with a marker by which lists leave it out.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.runs.find import (
    find_run_including_broken,
    find_runs,
    list_runs,
    make_unknown_run_error,
)
from echelon.runs.latest import LATEST, point_latest_to
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import SUBMISSION_FILE, Run
from echelon.runs.status import read_run_statuses
from echelon.runs.writer import claim_run_folder, release_run_folder
from echelon.utils.os_errors import format_os_error_reason

TRASH = ".trash"


class TrashedFolder(NamedTuple):
    """A folder in the trash: a run, or the code of a submission of several."""

    folder: Path
    removed: float
    """When it was moved there, in seconds since 1970."""
    size_bytes: int


# --- what is meant ---


def find_runs_to_remove(words: Sequence[str], root: str) -> list[Run]:
    """Return each run that these words name once: names, folders, jobs, groups, and patterns such
    as ``seed-*``. A broken run can be removed as well."""
    runs: dict[Path, Run] = {}
    for word in words:
        for run in _find_by_word(word, root):
            runs.setdefault(run.folder, run)
    return list(runs.values())


def _find_by_word(word: str, root: str) -> list[Run]:
    with contextlib.suppress(EchelonError):
        return find_runs(word, root)
    if glob.has_magic(word):
        known = list_runs(Path(root), include_broken=True)
        if matching := [run for run in known if fnmatch.fnmatchcase(run.name, word)]:
            return matching
        raise make_unknown_run_error(word, root)
    return [find_run_including_broken(word, root)]


# --- the trash ---


def move_to_trash(runs: Sequence[Run]) -> list[Path]:
    """Move runs into the trash beside them, and return where they are now.

    Raises an EchelonError before any is moved if one is queued or running. With the last run of a
    submission goes the folder with its code.
    """
    _claim_all(runs)
    try:
        moved = [_move_one_to_trash(run.folder) for run in runs]
    finally:
        for run in runs:
            release_run_folder(run)
    for path in moved:
        Run(path).writer_file.unlink(missing_ok=True)  # of the claim above, which is over
    moved += [_move_one_to_trash(folder) for folder in _find_empty_groups(runs)]
    for root in {run.folder.parent for run in runs}:
        _repair_latest_link(root)
    return moved


def _claim_all(runs: Sequence[Run]) -> None:
    """Make sure that nobody writes into these folders, now and while they are moved."""
    faults: list[Fault] = []
    for run in runs:
        try:
            claim_run_folder(run)
        except EchelonError as error:
            what = error.faults[0].what
            faults.append(Fault(what, f"end it first: echelon cancel {run.folder}"))
        except OSError as error:
            what = f"{run.folder} cannot be moved: {format_os_error_reason(error)}"
            faults.append(Fault(what, "it may belong to somebody else: see `ls -ld`"))
    if faults:
        for run in runs:
            release_run_folder(run)
        raise EchelonError(*faults)


def _move_one_to_trash(folder: Path) -> Path:
    """Move a folder; an older one of the same name in the trash makes room: NAME.1, NAME.2, …"""
    target = folder.parent / TRASH / folder.name
    try:
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            target.rename(_find_free_name(target))
        folder.rename(target)
        os.utime(target)  # when it was removed
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{folder} cannot be moved to {target.parent}: {format_os_error_reason(error)}",
                "see who owns the folder: `ls -ld`",
            ),
            exit=ExitCode.FAILED,
        ) from error
    return target


def _find_free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def _find_empty_groups(runs: Sequence[Run]) -> list[Path]:
    """Return the folders of submissions of several runs none of which is left."""
    groups = {run.folder.with_name(run.name.rpartition("-")[0]) for run in runs if "-" in run.name}
    return [
        group
        for group in sorted(groups)
        if (group / SUBMISSION_FILE).exists() and not Run(group).config_file.exists()
        if not any(group.parent.glob(f"{glob.escape(group.name)}-[0-9]*/"))
    ]


def _repair_latest_link(root: Path) -> None:
    """Give the name `latest` to another run if its own was removed."""
    link = root / LATEST
    if not link.is_symlink() or link.exists():
        return
    records, _ = read_run_records(list_runs(root))
    if newest := next((record.run for record in records if record.has_trained), None):
        point_latest_to(newest)
    else:
        link.unlink()


def restore_from_trash(words: Sequence[str], root: Path) -> list[Path]:
    """Move folders out of the trash again, and return where they are now.

    Raises an EchelonError before any is moved if one is not there, or if its name is in use again.
    """
    trash = root / TRASH
    found = [path for word in words for path in _find_in_trash(word, trash)]
    in_use = [path for path in found if (root / path.name).exists()]
    if in_use:
        raise EchelonError(
            *(
                Fault(
                    f"{root / path.name} is there again",
                    f"remove or rename it first; the old one is {path}",
                )
                for path in in_use
            )
        )
    return [path.rename(root / path.name) for path in dict.fromkeys(found)]


def _find_in_trash(word: str, trash: Path) -> list[Path]:
    if Path(word).name == word and (trash / word).is_dir():
        group = [trash / word] if (trash / word / SUBMISSION_FILE).exists() else []
        members = [run.folder for run in find_runs(word, str(trash))] if group else [trash / word]
        return [*dict.fromkeys([*group, *members])]
    names = [entry.folder.name for entry in list_trash(trash.parent, with_sizes=False)]
    raise EchelonError(
        Fault(
            f"there is no {word!r} in {trash.absolute()}",
            suggest_nearest(word, names) if names else "the trash is empty",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def list_trash(root: Path, with_sizes: bool = True) -> list[TrashedFolder]:
    """Return what is in the trash, the last that was removed first."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(root / TRASH) as entries:
        for entry in entries:
            path = Path(entry.path)
            size = _measure_folder(path) if with_sizes else 0
            found.append(TrashedFolder(path, entry.stat(follow_symlinks=False).st_mtime, size))
    return sorted(found, key=lambda each: each.removed, reverse=True)


def _measure_folder(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def empty_trash(entries: Sequence[TrashedFolder]) -> None:
    """Delete these folders for good."""
    faults = []
    for entry in entries:
        try:
            shutil.rmtree(entry.folder)
        except OSError as error:
            reason = format_os_error_reason(error)
            faults.append(Fault(f"{entry.folder} cannot be deleted: {reason}", "see `ls -lR`"))
    if faults:
        raise EchelonError(*faults, exit=ExitCode.FAILED)


# --- the archive ---


def archive_runs(runs: Sequence[Run]) -> None:
    """Leave runs out of lists. Raises an EchelonError before any is marked if one is queued or
    running, because such a run is always listed."""
    statuses, _ = read_run_statuses(runs)
    active = [status for status in statuses if status.is_active]
    if active:
        raise EchelonError(
            *(
                Fault(
                    f"run {status.run} is {status.state}, and such a run is always listed",
                    f"wait for its end, or end it: echelon cancel {status.folder}",
                )
                for status in active
            )
        )
    for run in runs:
        run.archive_file.touch()


def unarchive_runs(runs: Sequence[Run]) -> None:
    """List runs again."""
    for run in runs:
        run.archive_file.unlink(missing_ok=True)


def list_archived_runs(root: Path) -> list[Run]:
    """Return the runs of a folder that are archived, by name."""
    return [run for run in list_runs(root, include_broken=True) if run.archive_file.exists()]
