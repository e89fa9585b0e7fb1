"""One builder at a time, on every host that shares the folder of an environment.

The builder's child inherits the lock, so a pip that outlives its killed parent still keeps others
out. A file system without locks is refused: two builders in one folder would destroy each other's
work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.utils.locks import FileLock, LocksUnsupportedError, describe_owner

PrintLine = Callable[[str], None]
"""Shows one line to the person who waits."""

_RETRY_S = 0.2
_REMIND_S = 60.0


@contextlib.contextmanager
def wait_for_lock(path: Path, what: str, print_line: PrintLine) -> Iterator[FileLock]:
    """Hold the lock during the block. While another process holds it, print so and wait."""
    started = reported = time.monotonic()
    while (lock := try_lock(path)) is None:
        now = time.monotonic()
        if reported == started or now - reported > _REMIND_S:
            print_line(f"waiting for {describe_owner(path)}, which has locked {what}")
            reported = now
        time.sleep(_RETRY_S)
    try:
        yield lock
    finally:
        lock.release()


def try_lock(path: Path) -> FileLock | None:
    """Return the lock, held, or None where another process has it."""
    lock = FileLock(path, mode=0o600, records_owner=True)
    try:
        return lock if lock.try_acquire() else None
    except LocksUnsupportedError as error:
        raise EchelonError(
            Fault(
                f"{path.parent} is on a file system without locks",
                "take one that has them (Lustre when mounted with -o flock): for environments set "
                "ECHELON_CACHE to a folder there, for runs run.dir=PATH",
            )
        ) from error


@contextlib.contextmanager
def lock_if_unused(path: Path) -> Iterator[bool]:
    """Yield whether nobody holds a lock on this file, and hold it during the block if so.

    A file that is not there is used by nobody. Nor is one on a file system without locks, where
    nothing can be known about jobs and the time of their last start has to do.
    """
    if not path.exists():
        yield True
        return
    lock = FileLock(path)
    try:
        is_held = is_unused = lock.try_acquire()
    except LocksUnsupportedError:
        is_held, is_unused = False, True
    try:
        yield is_unused
    finally:
        if is_held:
            lock.release()
