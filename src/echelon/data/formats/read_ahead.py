"""Asks the system to read parts of files into its cache before they are needed."""

from __future__ import annotations

import contextlib
import os

from echelon.data.formats.byte_source import DataPath
from echelon.object_store.remote_file import RemoteFile

_PIECE_BYTES = 128 << 10
"""Linux reads no more at a hint than its own read-ahead of the disk, which is this by default."""


def read_ahead(path: DataPath, start: int = 0, stop: int | None = None) -> None:
    """Have the bytes `[start, stop)` of a file, or all of it, read into the system's cache, without
    waiting for them. Those of an object are brought to the local disk.

    It is a hint: a file that cannot be opened is no error here, and a system that takes no such
    hints is given none.
    """
    if isinstance(path, RemoteFile):
        path.prefetch(start, stop)
        return
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(handle).st_size if stop is None else stop
            if start < end and not _is_cached(handle, start, end):
                for offset in range(start, end, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, end - offset)
                    os.posix_fadvise(handle, offset, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def _is_cached(handle: int, start: int, stop: int) -> bool:
    """Return whether three bytes are in the cache: at the beginning, in the middle, at the end. To
    ask takes a tenth of the time in which the system finds all pages of a chunk there."""
    byte = bytearray(1)
    try:
        for offset in (start, (start + stop) // 2, stop - 1):
            os.preadv(handle, [byte], offset, os.RWF_NOWAIT)
    except OSError:  # it is not there, or the file system cannot tell
        return False
    return True
