"""The lock of a sweep, which its workers on many hosts share through its folder."""

from __future__ import annotations

from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import describe_os_error


class SweepLock:
    """A FileLock whose failures are faults. Its holder may take it again."""

    def __init__(self, path: Path, busy: str = "") -> None:
        """With ``busy``, whoever comes second is refused with this sentence instead of waiting."""
        self._lock = FileLock(path)
        self._busy = busy

    def __enter__(self) -> None:
        try:
            if not self._busy:
                self._lock.acquire()
            elif not self._lock.try_acquire():
                raise EchelonError(Fault(self._busy, "wait for its end, or stop it"))
        except LocksUnsupportedError as error:
            folder, reason = self._lock.path.parent, describe_os_error(error)
            raise EchelonError(
                Fault(
                    f"{folder} is on a file system without locks: {reason}",
                    "give another place with --dir PATH (Lustre has locks when mounted with "
                    "-o flock)",
                )
            ) from None

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
