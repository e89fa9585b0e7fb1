"""A lock that many hosts share through a folder, and that goes with the process that holds it.

The kernel holds it (flock, over NFS a lock at the server), so that after `kill -9` the next one has
it at once. A lock file, as Optuna has for its journals, is left behind then: everybody waits 30 s
for it and some may break it together.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.utils.os_errors import describe_os_error

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class Lock:
    """May be taken again by its holder. Open only while it is held: a child that is forked in the
    meantime would hold it too."""

    def __init__(self, path: Path, busy: str = "") -> None:
        self._path = path
        self._busy = busy
        """Said to whom comes second, who otherwise waits."""
        self._handle = -1
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._handle = _opened(self._path)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if self._busy else 0))
            except OSError as error:
                os.close(self._handle)
                if isinstance(error, BlockingIOError):
                    raise EchelonError(Fault(self._busy, "wait for its end, or stop it")) from None
                if error.errno in _UNSUPPORTED:
                    raise _no_locks(self._path, error) from None
                raise
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            os.close(self._handle)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # somebody else's, to look at


def _no_locks(path: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"{path.parent} is on a file system without locks: {describe_os_error(error)}",
            "give another place with --dir PATH (Lustre has locks when mounted with -o flock)",
        )
    )
