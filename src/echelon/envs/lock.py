"""One builder at a time, on every host that shares the folder.

`flock` where the file system knows it (local ones; NFS, which turns it into a lock of its server;
Lustre and others when mounted with it): it ends with its holder, however that ends. The builder's
child inherits it, so a pip that outlives its killed parent still keeps others out. Elsewhere a file
made with O_EXCL and touched every few seconds: its holder is gone when it stops changing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

Say = Callable[[str], None]

_UNKNOWN_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOOK_S = 0.2
_REMIND_S = 60.0
BEAT_S = 5.0
STALE_S = 45.0
"""Without a beat. Long, as an NFS client may show an old time for many seconds."""


class Held(Protocol):
    def mine(self) -> bool:
        """Whether it still is: a lease can be taken from who was stopped for too long."""

    def inherited(self) -> tuple[int, ...]:
        """File descriptors for children to keep."""


@contextlib.contextmanager
def held(path: Path, what: str, say: Say) -> Iterator[Held]:
    """Wait for it, saying so, and hold it."""
    lock: _Flock | _Lease | None = None
    began = told = time.monotonic()
    while lock is None:
        lock = taken(path)
        if lock is None:
            now = time.monotonic()
            if told == began or now - told > _REMIND_S:
                say(f"waiting for {owner(path)}, which has {what} under way")
                told = now
            time.sleep(_LOOK_S)
    try:
        yield lock
    finally:
        lock.release()


def taken(path: Path) -> _Flock | _Lease | None:
    """At once, or not at all."""
    try:
        return _Flock.taken(path)
    except OSError as error:
        if error.errno not in _UNKNOWN_HERE:
            raise
        return _Lease.taken(path)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody holds it, on any host that shares the file, for as long as the block lasts.
    Not told by a file system without locks, where the last use must do."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    except OSError:  # no locks here
        alone = True
    try:
        yield alone
    finally:
        os.close(file)


def owner(path: Path) -> str:
    """For messages; what is in the file is only a note."""
    for file in (_lease(path), path):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = json.loads(file.read_text(encoding="utf-8"))
            return f"process {said['pid']} on {said['host']}"
    return "another process"


def _note(token: str = "") -> bytes:
    who = {"pid": os.getpid(), "host": socket.gethostname(), "token": token}
    return json.dumps(who).encode()


class _Flock:
    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def taken(cls, path: Path) -> _Flock | None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(file, path):
                raise BlockingIOError  # `clean` removed it between our open and our lock
            os.ftruncate(file, 0)
            os.pwrite(file, _note(), 0)
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        return cls(file)

    def mine(self) -> bool:
        return True

    def inherited(self) -> tuple[int, ...]:
        return (self._file,)

    def release(self) -> None:
        os.close(self._file)


def _is_still(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


# --- where there is no flock ---


def _lease(path: Path) -> Path:
    return path.with_name(f"{path.name}-lease")


_seen: dict[Path, tuple[float, float]] = {}
"""When a lease of somebody else was last seen to change: its own time, and ours. Clocks of hosts
differ, so that the two are never compared."""


class _Lease:
    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token = path, token
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @classmethod
    def taken(cls, lock: Path) -> _Lease | None:
        path, token = _lease(lock), secrets.token_hex(8)
        cls._remove_stale(path)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        os.write(file, _note(token))
        os.fsync(file)
        os.close(file)
        _seen.pop(path, None)
        return cls(path, token)

    @classmethod
    def _remove_stale(cls, path: Path) -> None:
        try:
            changed, said = path.stat().st_mtime, path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        now = time.monotonic()
        last, since = _seen.get(path, (0.0, 0.0))
        if changed != last:
            _seen[path] = (changed, now)
            since = now
        if now - since < STALE_S and not _died_here(said):
            return
        # A rename succeeds for one only. Should it have caught a newer lease, its holder finds
        # out by the next beat and gives up before it vouches for anything.
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            aside.unlink()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            if self.mine():
                with contextlib.suppress(OSError):
                    os.utime(self._path)

    def mine(self) -> bool:
        try:
            return bool(json.loads(self._path.read_text(encoding="utf-8"))["token"] == self._token)
        except (OSError, ValueError, KeyError):
            return False

    def inherited(self) -> tuple[int, ...]:
        return ()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        if self.mine():
            self._path.unlink(missing_ok=True)


def _died_here(said: str) -> bool:
    """A holder on this very host need not be waited for."""
    try:
        who = json.loads(said)
        if who["host"] != socket.gethostname():
            return False
        os.kill(int(who["pid"]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, PermissionError):
        return False
    return False
