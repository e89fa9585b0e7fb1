"""Files of a snapshot, checksummed while they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from echelon.snapshot.manifest import CHUNK_BYTES, BlockChecksum, ManifestEntry, format_part_name


def write_parts(folder: Path, parts: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    """Write one file per part and return their manifest entries; the content of each file is
    flushed to disk, the folder that names them is not."""
    return {
        format_part_name(n): _write_part(folder / format_part_name(n), tree)
        for n, tree in parts.items()
    }


def _write_part(path: Path, tree: Any) -> ManifestEntry:
    with _open_checksummed(path) as sink:
        torch.save(tree, cast(IO[bytes], sink))  # it needs write and flush only
    return sink.make_entry()


def write_file(path: Path, data: bytes) -> ManifestEntry:
    """Write a file, flush it to disk, and return its manifest entry."""
    with _open_checksummed(path) as sink:
        sink.write(data)
    return sink.make_entry()


class _ChecksummedFile:
    """A file that is checksummed while it is written, in chunks and without the GIL.

    Given a path, ``torch.save`` writes by itself: the checksum would need a second pass, and a full
    disk is reported as "unexpected pos 640 vs 534". Either way another thread waits about 5 ms at a
    time while 600 MB are written (over an old file, which never happens here, 90 to 160 ms).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._checksum = BlockChecksum()
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``; an error is kept until flush_to_disk()."""
        view = memoryview(data).cast("B")
        # Kept for later and not raised: our caller is C++ code that still has to close its
        # archive, and would answer with an error of its own.
        if self._error is None:
            try:
                self._write(view)
            except OSError as error:
                self._error = error
        return len(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._checksum.update(piece)
            self._size += len(piece)
            while piece:
                piece = piece[os.write(self._file, piece) :]

    def flush(self) -> None:
        """Asked for by torch.save; nothing is buffered here."""

    def flush_to_disk(self) -> None:
        """Flush the file to disk. Raises the first error of any write, with the file's name."""
        try:
            if self._error is not None:
                raise self._error
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        os.close(self._file)

    def make_entry(self) -> ManifestEntry:
        """Return size and checksum of what was written."""
        return ManifestEntry(self._size, self._checksum.hexdigest())


@contextlib.contextmanager
def _open_checksummed(path: Path) -> Iterator[_ChecksummedFile]:
    """Create a new file, flush it at the end of the block and close it in any case."""
    file = _ChecksummedFile(path)
    try:
        try:
            yield file
        finally:
            file.flush_to_disk()
    finally:
        file.close()
