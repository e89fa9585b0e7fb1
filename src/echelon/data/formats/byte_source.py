"""The bytes of a file of data, which is on a file system or in an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.folder_scan import stat_regular_file
from echelon.object_store.block_cache import BLOCK_BYTES
from echelon.object_store.remote_file import RemoteFile

DataPath = Path | RemoteFile
"""Where data is. Readers use what both have; for the rest there are the functions of this file."""


def get_size(path: DataPath) -> int:
    """Return the bytes of a file. Raises OSError for a pipe and the like."""
    return path.size if isinstance(path, RemoteFile) else stat_regular_file(path).st_size


def open_for_arrow(path: DataPath) -> Any:
    """Return what pyarrow's readers take."""
    return path.open() if isinstance(path, RemoteFile) else path


def fetch_local_copy(path: DataPath) -> Path:
    """Return a local file that can be mapped at once. An object is fetched as a whole."""
    return path.fetch_whole() if isinstance(path, RemoteFile) else path


def list_blocks(starts: NDArray[Any], stops: NDArray[Any]) -> list[int]:
    """Return the blocks of an object that have some of the bytes between offsets."""
    first, last = starts // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES
    found = {*map(int, first.tolist()), *map(int, last.tolist())}
    for number in np.flatnonzero(last > first + 1).tolist():
        found.update(range(int(first[number]), int(last[number])))
    return sorted(found)


class LocalSource:
    """An open file. It is closed when nobody uses it any more: another thread may be reading from
    it. Reading at an offset shares no position, so forked processes go on with the descriptors that
    they inherit."""

    def __init__(self, path: Path) -> None:
        stat_regular_file(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._handle)
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, fewer only where it ends."""
        data = os.pread(self._handle, size, offset)
        while 0 < len(data) < size:  # Linux reads at most 2 GiB at once
            more = os.pread(self._handle, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def stream_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer, for a reader that goes through the file, and return the bytes read."""
        return os.preadv(self._handle, [buffer], offset)


class RemoteSource:
    """An object, with the methods of LocalSource."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.size, self.mtime_ns = file.size, 0
        self.read_at = file.read_at

    def stream_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer; what follows is fetched meanwhile."""
        self._file.prefetch_after(offset)
        return self._file.read_into(buffer, offset)


ByteSource = LocalSource | RemoteSource


def open_source(path: DataPath) -> ByteSource:
    """Open a file. Raises OSError, or ObjectStoreError when it is read."""
    return RemoteSource(path) if isinstance(path, RemoteFile) else LocalSource(path)
