"""The index of one file of data: how it is made, written, and read again.

magic, length of the header, checksum of header and chunks
header, as JSON: kind, stamp of the file, number of samples, notes
chunks: the first sample of each, then the bytes of each    int64
offsets of the samples                                      uint64
spans of the samples                                        uint32, or uint64 if one is longer
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath, LocalSource
from echelon.data.formats.reader import CHUNK_BYTES
from echelon.errors import EchelonError, Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.files import replace_file
from echelon.utils.os_errors import format_os_error_reason

_MAGIC = b"echindex"
_PREFIX = struct.Struct("<8sQQ")
"""The magic, the length of the header, the checksum of header and chunks."""
INDEX_VERSION = 1
_CHECKED_BYTES = 16 << 10
"""So much of the head and of the tail of a file is compared with what was indexed."""


class SampleSpans(NamedTuple):
    """Where the samples of one file are, in the order of the file."""

    offsets: NDArray[np.uint64]
    """Of the first byte of each sample, ascending."""
    spans: NDArray[np.uint64]
    """Bytes from there to the end of each sample."""
    notes: dict[str, Any]
    """What else the format keeps of a file, as JSON: `{"columns": {"jpg": 1000}}`."""


BuildIndex = Callable[[DataPath], SampleSpans]
"""Reads a file and returns where its samples are. A function at the top of a module: it is called
by its name in other processes; or a partial of one, with keywords that JSON can say. Raises
EchelonError for a file that is damaged."""


class FileStamp(NamedTuple):
    """What shows that a file is the one that was indexed."""

    size: int
    mtime_ns: int
    checksum: int
    """Of its head and its tail."""


class StoredIndex(NamedTuple):
    """An index file that fits its file of data."""

    path: Path
    stamp: FileStamp
    checksum: int
    samples: int
    span_type: str
    notes: dict[str, Any]
    chunk_starts: NDArray[np.int64]
    """Of this file alone, from 0."""
    chunk_bytes: NDArray[np.int64]
    offsets_at: int
    """Where the offsets begin in the index file; the spans follow them."""


class IndexTask(NamedTuple):
    """One file to index."""

    file: DataPath
    target: Path
    kind: str
    build_one: BuildIndex

    def run(self) -> list[Fault]:
        """Index the file and write what was found. Return what is wrong with it."""
        try:
            stamp = stamp_file(self.file)
            spans = self.build_one(self.file)
            is_same = stamp_file(self.file) == stamp
        except EchelonError as error:
            return [*error.faults]
        except OSError as error:
            return [make_unreadable_fault(self.file, error)]
        if not is_same:
            return [make_changed_fault(self.file)]
        try:
            _write_index(self.target, self.kind, stamp, spans)
        except OSError as error:
            what = f"the index of {self.file} cannot be written into {self.target.parent}: "
            return [Fault(what + format_os_error_reason(error), "free some space there")]
        return []


def stamp_file(file: DataPath) -> FileStamp:
    if isinstance(file, RemoteFile):  # its ETag is sent with all that is read of it
        text = "\n".join(map(str, file.info))
        return FileStamp(file.size, 0, xxhash.xxh3_64_intdigest(text.encode()))
    source = LocalSource(file)
    checksum = xxhash.xxh3_64(source.read_at(0, _CHECKED_BYTES))
    tail = max(_CHECKED_BYTES, source.size - _CHECKED_BYTES)
    checksum.update(source.read_at(tail, _CHECKED_BYTES))
    return FileStamp(source.size, source.mtime_ns, checksum.intdigest())


def read_index(path: Path, kind: str) -> StoredIndex | None:
    """Return what an index file says, or None if it is absent, of another kind or damaged."""
    try:
        with path.open("rb") as file:
            magic, header_size, checksum = _PREFIX.unpack(file.read(_PREFIX.size))
            size = os.fstat(file.fileno()).st_size
            if magic != _MAGIC or header_size > size:
                return None
            text = file.read(header_size)
            header = json.loads(text)
            if header["version"] != INDEX_VERSION or header["kind"] != kind:
                return None
            chunks, samples = int(header["chunks"]), int(header["samples"])
            numbers = file.read(16 * chunks)
            offsets_at = file.tell()
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    if xxhash.xxh3_64_intdigest(text + numbers) != checksum:
        return None
    span_type = str(header["span_type"])
    if size != offsets_at + samples * (8 + np.dtype(span_type).itemsize):
        return None
    table = np.frombuffer(numbers, np.int64).reshape(2, chunks)
    stamp = FileStamp(*header["stamp"])
    return StoredIndex(
        path, stamp, checksum, samples, span_type, header["notes"], table[0], table[1], offsets_at
    )


def _write_index(target: Path, kind: str, stamp: FileStamp, found: SampleSpans) -> None:
    offsets = np.ascontiguousarray(found.offsets, np.uint64)
    longest = int(found.spans.max()) if len(found.spans) else 0
    spans = np.ascontiguousarray(found.spans, np.uint32 if longest < 1 << 32 else np.uint64)
    # A sample belongs to the piece of the file in which it begins.
    starts = np.flatnonzero(np.diff(offsets // CHUNK_BYTES, prepend=np.uint64(1 << 63)))
    sizes = np.add.reduceat(spans, starts, dtype=np.int64) if len(starts) else starts
    header = {
        "version": INDEX_VERSION,
        "kind": kind,
        "stamp": list(stamp),
        "samples": len(offsets),
        "chunks": len(starts),
        "span_type": spans.dtype.name,
        "notes": found.notes,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % 8)  # the numbers that follow are mapped
    chunks = starts.astype(np.int64).tobytes() + sizes.astype(np.int64).tobytes()
    checksum = xxhash.xxh3_64_intdigest(text + chunks)
    with replace_file(target) as temporary, temporary.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, len(text), checksum) + text + chunks)
        file.write(offsets.data)
        file.write(spans.data)


def make_unreadable_fault(file: DataPath, error: OSError) -> Fault:
    return Fault(
        f"{file} cannot be read: {format_os_error_reason(error)}",
        "check the path and its permissions",
    )


def make_changed_fault(file: DataPath) -> Fault:
    return Fault(
        f"{file} changed since it was indexed",
        "let its writer finish, and start again: it is indexed anew then",
    )
