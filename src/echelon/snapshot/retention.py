"""Which snapshots stay, and which of them is marked as the best."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from echelon.snapshot.layout import (
    BEST_LINK,
    MANIFEST_FILE,
    find_best,
    list_snapshots,
    parse_step,
)
from echelon.snapshot.manifest import InvalidSnapshotError, read_manifest
from echelon.utils.files import flush_to_disk, replace_file


def remove_old_snapshots(
    root: Path, step: int, keep_last: int, needed: Collection[Path] = ()
) -> None:
    """Remove all but the last ``keep_last`` snapshots up to ``step``, the best one, and those that
    are needed.

    ``step`` was just saved and so is known to be valid. Later steps are from before a return to an
    older snapshot. If they counted, a damaged one among them could push out the only valid one;
    they are removed once the run has passed them again.
    """
    folders = [f for f in list_snapshots(root) if (parse_step(f.name) or 0) <= step]
    kept = {find_best(root), *needed}
    hidden_folders = [hide_folder(folder) for folder in folders[:-keep_last] if folder not in kept]
    if hidden_folders:
        flush_to_disk(root)  # hidden for good before the first file goes
    for hidden in hidden_folders:
        delete_path(hidden)


def mark_best(folder: Path) -> None:
    """Make ``best`` lead to this folder, atomically and on disk."""
    root = folder.parent
    if (root / BEST_LINK / MANIFEST_FILE).is_file() and not (root / BEST_LINK).is_symlink():
        delete_path(hide_folder(root / BEST_LINK))  # made of the link by a copy that followed links
    # The prefix is that of all unfinished work, which the next open() removes.
    with replace_file(root / BEST_LINK, durable=True, prefix=".writing-") as temporary:
        temporary.symlink_to(folder.name)


def unmark_best(root: Path) -> None:
    """Remove the link ``best``, on disk when this returns."""
    (root / BEST_LINK).unlink()
    flush_to_disk(root)


def recover_best(root: Path, resumed_step: int | None) -> None:
    """Write the mark of the best snapshot that a kill between publishing and marking has
    prevented."""
    folders = [folder for folder in list_snapshots(root) if is_up_to(resumed_step, folder)]
    last = next(filter(_is_best_in_manifest, reversed(folders)), None)
    if last is None or last == find_best(root):
        return
    # By time, not by step: after a return to an older snapshot the lower step is the later one.
    if (
        find_best(root) is None
        or (root / BEST_LINK).lstat().st_mtime < (last / MANIFEST_FILE).stat().st_mtime
    ):
        mark_best(last)


def is_up_to(step: int | None, folder: Path) -> bool:
    """Return whether the step of a folder is not after ``step``; every one is if ``step`` is
    None."""
    return step is None or (parse_step(folder.name) or 0) <= step


def _is_best_in_manifest(folder: Path) -> bool:
    """Return whether the manifest says that the snapshot was the best when it was saved."""
    try:
        return read_manifest(folder).is_best
    except InvalidSnapshotError:
        return False


def hide_folder(folder: Path) -> Path:
    """Rename a folder so that it is no longer a snapshot, before anything in it is deleted."""
    hidden = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, hidden)
    return hidden


def delete_path(path: Path) -> None:
    """Delete a file or folder as far as possible. What stays has a hidden name, and is tried
    again when the run is next opened."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
