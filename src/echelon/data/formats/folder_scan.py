"""The entries of folders: which are folders too, and which can be read as files.

Links are followed, as they are how people put data together. One that leads back to a folder it is
in would give its files again and again, and is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.utils.os_errors import format_os_error_reason

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FolderPath(NamedTuple):
    """A folder, and what tells it and those that lead to it from others: device and inode."""

    path: Path
    identities: tuple[tuple[int, int], ...] = ()


def scan_folder(folder: FolderPath) -> tuple[list[os.DirEntry[str]], FolderPath]:
    """Return the entries of a folder by name, and the folder with its own identity, for those
    below. Raises EchelonError where it cannot be read, and where it is one of those that lead to
    it."""
    path = folder.path
    try:
        status = os.stat(path)
        identity = status.st_dev, status.st_ino
        if identity in folder.identities:
            what = f"{path} is a link that leads back to a folder it is in"
            raise EchelonError(Fault(what, "remove the link"))
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        what = f"{path} cannot be read: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, "check the path and its permissions")) from error
    return entries, FolderPath(path, (*folder.identities, identity))


def enter_folder(entry: os.DirEntry[str], folder: FolderPath) -> FolderPath | None:
    """Return an entry of a folder as a folder; None for one that is none."""
    try:
        is_folder = entry.is_dir()
    except OSError:  # a link to itself: reading it says so
        return None
    return FolderPath(Path(entry.path), folder.identities) if is_folder else None


def stat_regular_file(path: Path) -> os.stat_result:
    """Return what the system knows of a file. Raises OSError for a pipe and the like: opening one
    may wait for ever."""
    status = os.stat(path)
    if kind := _KINDS.get(stat.S_IFMT(status.st_mode)):
        raise OSError(f"it is {kind}")
    return status
