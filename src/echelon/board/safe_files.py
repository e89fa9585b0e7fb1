"""Files of a run that are shown as they are: they must lie in the run's folder, whatever links say.

A run folder may be of somebody else, who put a link to a file of the reader's into it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from echelon.board.request import NotFoundError
from echelon.utils.os_errors import format_os_error_reason


def open_inside(path: Path, folder: Path) -> int:
    """Return a handle of a plain file that is really in a folder; NotFoundError for any other.

    What was opened is looked at, not the name: a name may lead elsewhere a moment later.
    """
    try:
        # Without waiting: a pipe under the name of a log would never be opened.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NotFoundError(
            f"{path.name} cannot be read: {format_os_error_reason(error)}"
        ) from None
    try:
        real = os.readlink(f"/proc/self/fd/{handle}").removesuffix(" (deleted)")
        is_inside = real.startswith(os.path.realpath(folder).rstrip("/") + "/")
        if is_inside and stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
    except OSError:
        pass
    os.close(handle)
    raise NotFoundError(f"{path.name} is not a file of this folder")


def read_inside(path: Path, folder: Path, max_bytes: int) -> bytes:
    """Return the beginning of a plain file that is really in a folder."""
    handle = open_inside(path, folder)
    with os.fdopen(handle, "rb") as file:
        return file.read(max_bytes)
