"""Exclusive locks on files, for processes of one host and of all hosts that share a folder.

The kernel holds them (``flock``; NFS makes it a lock of its server, Lustre has it when mounted with
``-o flock``), so a lock ends with its holder, however that ends: after ``kill -9`` the next process
has it at once. A lock that is the existence of a file would be left behind.

The package ``filelock`` was considered and left. It offers no descriptor for a child to inherit, it
falls back to lock files that stay after a kill where ``flock`` is missing, and it cannot lock a
file of somebody else that may only be read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from echelon.utils.files import read_json_object

_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class LocksUnsupportedError(OSError):
    """The file system has no locks."""


class FileLock:
    """An exclusive lock on a file, which is made if it is not there, and stays.

    Use it as a context manager, which waits, or call try_acquire(), which does not. The holder may
    acquire it again and releases it as often. The file is open only while the lock is held: a
    process that is forked meanwhile holds it too, for as long as it keeps the descriptor.

    ``records_owner`` has the holder write its process and host into the file, for the messages of
    others: see describe_owner().
    """

    def __init__(self, path: Path, *, mode: int = 0o644, records_owner: bool = False) -> None:
        self.path = path
        self._mode = mode
        self._records_owner = records_owner
        self._handle = -1
        self._depth = 0

    def acquire(self) -> None:
        """Wait for the lock; LocksUnsupportedError where the file system has none."""
        while not self._acquire_once(0):
            pass  # the file was removed while we waited for it: another one is the lock now

    def try_acquire(self) -> bool:
        """Take the lock if nobody else has it, and return whether it is held now."""
        return self._acquire_once(fcntl.LOCK_NB)

    def release(self) -> None:
        """Undo one acquire; the last one opens the lock to others."""
        self._depth -= 1
        if self._depth == 0:
            os.close(self._handle)
            self._handle = -1

    @property
    def is_held(self) -> bool:
        return self._depth > 0

    def is_current(self) -> bool:
        """Return whether the file that is locked is still the one at the path."""
        return _is_same_file(self._handle, self.path)

    def fileno(self) -> int:
        """Return the descriptor that holds the lock.

        A child that inherits it (``pass_fds``) keeps others out even when this process is killed.
        """
        return self._handle

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _acquire_once(self, flags: int) -> bool:
        if self._depth == 0:
            handle = self._open()
            try:
                is_ours = self._lock(handle, flags)
            except BaseException:
                os.close(handle)
                raise
            if not is_ours:
                os.close(handle)
                return False
            self._handle = handle
        self._depth += 1
        return True

    def _open(self) -> int:
        # In a folder that others may write, a link could have us truncate a file of our own.
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | flags, self._mode)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
        # Somebody else's file: to be read only, but locked all the same.
        return os.open(self.path, os.O_RDONLY | flags)

    def _lock(self, handle: int, flags: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise LocksUnsupportedError(error.errno, error.strerror, str(self.path)) from error
        if not _is_same_file(handle, self.path):
            return False  # removed between our open and our lock, which therefore guards nothing
        if self._records_owner:
            owner = {"pid": os.getpid(), "host": socket.gethostname()}
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(owner).encode(), 0)
        return True


def is_locked(path: Path) -> bool:
    """Return whether somebody holds the lock on this file; False where there is no such file, and
    where the file system has no locks.

    To ask, the lock is shared for an instant, and a try_acquire() of another process fails then.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)
    return False


def describe_owner(path: Path) -> str:
    """Return ``process 7 on node1`` for a lock that records its owner, for use in messages only.

    Whether the lock is held says the kernel, not this note, which stays after a release.
    """
    owner = read_json_object(path)
    if owner is None or not {"pid", "host"} <= owner.keys():
        return "another process"
    return f"process {owner['pid']} on {owner['host']}"


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
