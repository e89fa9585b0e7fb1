"""The only reader of ``metrics.jsonl``: whole, its ends, or what a training appends.

Each line is one JSON object. A killed writer leaves half a line at the end, and a reader of the
end may see half a line at the beginning: whatever is not a JSON object is skipped. The writer is
`tracking.metrics_writer`. Lines are read one by one, because a file may be larger than the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeGuard

MetricsLine = dict[str, Any]
"""One line: `step`, `epoch`, and what was measured there."""

SPEED_METRICS = (
    *("samples_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms", "optimizer_ms"),
    *("mfu", "memory_gb", "slowest_rank", "slowest_x"),
)
"""How fast a run was, not how good: they differ even between two runs of the same settings. A line
has only those that were measured since the line before."""

_HEAD_BYTES = 4096
_TAIL_BYTES = 8 * 1024
"""Enough lines to compute the present speed; more is read where long lines are between them."""
_MAX_LINE_BYTES = 1 << 20
"""A longer line is not one of metrics, and is read in pieces that are skipped."""
MARK_BYTES = 64
_MAX_FLOAT = sys.float_info.max


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return all lines of a metrics file; a missing file has none. For files that are known to be
    small: a long training has more lines than fit into memory."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of a metrics file one by one; a missing file has none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while text := file.readline(_MAX_LINE_BYTES):
            if (line := _parse_line(text)) is not None:
                yield line


def read_first_metrics(path: Path) -> MetricsLine | None:
    """Return the first line; None if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            return _parse_line(file.readline(_HEAD_BYTES))
    except OSError:
        return None


def read_recent_metrics(path: Path) -> list[MetricsLine]:
    """Return the last lines that have a step and a time, without reading the lines before them.

    An unreadable file has none.
    """
    tail_bytes = _TAIL_BYTES
    while True:
        tail = _read_tail(path, tail_bytes)
        lines = (_parse_line(text) for text in tail.splitlines())
        found = [line for line in lines if line is not None]
        timed = [line for line in found if all(is_number(line.get(k)) for k in ("step", "time"))]
        if len(timed) > 1 or len(tail) < tail_bytes or tail_bytes > _MAX_LINE_BYTES:
            return timed
        tail_bytes *= 16


class MetricsFollower:
    """Reads a metrics file while it grows, and remembers how far it came.

    A run that resumes from a snapshot writes a new, shorter file: then this reads from the start.
    It is recognised by ``mark``, a checksum of the bytes before ``offset``, so that a position can
    be kept in a file and a copy of a run folder is known as the same.
    """

    def __init__(self, path: Path, offset: int = 0, mark: str = "") -> None:
        self._path = path
        self.offset, self.mark = offset, mark

    def read_new_lines(self) -> tuple[Iterator[MetricsLine], bool]:
        """Return the whole lines that were added since the last call, and whether the file began
        anew, so that earlier lines no longer count.

        The lines are read as they are taken, and must be taken before the next call. An unreadable
        file has none.
        """
        try:
            with self._path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if self.offset and 0 <= size - self.offset <= _TAIL_BYTES:
                    # Of most runs nothing is new, and of those that train a few lines.
                    lines = self._take_few_lines(file)
                    if lines is not None:
                        return iter(lines), False
                is_new = self.offset == 0 or compute_mark(file, self.offset) != self.mark
        except OSError:
            return iter(()), False
        if is_new:
            self.offset = 0
        return self._iterate_lines(), is_new

    def _take_few_lines(self, file: IO[bytes]) -> list[MetricsLine] | None:
        """Return the new lines of a file that has grown a little, by one read; None where it began
        anew."""
        known = min(MARK_BYTES, self.offset)
        file.seek(self.offset - known)
        data = file.read()
        if len(data) < known or hash_mark(data[:known]) != self.mark:
            return None
        end = data.rfind(b"\n") + 1
        if end <= known:
            return []
        self.offset += end - known
        self.mark = hash_mark(data[max(0, end - MARK_BYTES) : end])
        lines = (_parse_line(text) for text in data[known : end - 1].split(b"\n"))
        return [line for line in lines if line is not None]

    def _iterate_lines(self) -> Iterator[MetricsLine]:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self.offset)
            while text := file.readline(_MAX_LINE_BYTES):
                if not text.endswith(b"\n") and len(text) < _MAX_LINE_BYTES:
                    break  # it is being written
                self.offset += len(text)
                if (line := _parse_line(text)) is not None:
                    yield line
            self.mark = compute_mark(file, self.offset)


class MetricsBlocks:
    """An open metrics file for those who read very many lines, or look for one that they have seen:
    blocks of whole lines by their position. Raises OSError as open() does."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def __enter__(self) -> MetricsBlocks:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def get_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def compute_mark(self, offset: int) -> str:
        """Return the checksum of the bytes before a position; see `MetricsFollower`."""
        return compute_mark(self._file, offset)

    def read_last_bytes(self, offset: int) -> bytes:
        """Return the bytes before a position of which the checksum is made."""
        start = max(0, offset - MARK_BYTES)
        return os.pread(self._file.fileno(), offset - start, start)

    def read_block(self, offset: int) -> bytes:
        """Return whole lines from a position on, 1 MB at most. What does not end with a newline is
        a piece of a line that is too long, and to be skipped; nothing is a line that is being
        written, or the end."""
        block = os.pread(self._file.fileno(), _MAX_LINE_BYTES, offset)
        end = block.rfind(b"\n") + 1
        return block[:end] if end or len(block) < _MAX_LINE_BYTES else block

    def read_line(self, offset: int) -> MetricsLine | None:
        """Return the line that begins at a position; None if none does."""
        text = os.pread(self._file.fileno(), _MAX_LINE_BYTES, offset)
        return _parse_line(text[: text.find(b"\n") + 1])


def compute_mark(file: IO[bytes], offset: int) -> str:
    """Return the checksum of the last bytes before an offset; empty where the file is shorter."""
    start = max(0, offset - MARK_BYTES)
    file.seek(start)
    text = file.read(offset - start)
    return hash_mark(text) if len(text) == offset - start else ""


def hash_mark(text: bytes) -> str:
    """Return the checksum of the bytes before a position."""
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _read_tail(path: Path, size: int) -> bytes:
    """Return the last bytes of a file; its first line may be cut. Unreadable: empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read()
    except OSError:
        return b""


def _parse_line(text: bytes) -> MetricsLine | None:
    """Return the JSON object of a line, or None."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that can be drawn.

    Excludes true and false, integers beyond the range of a float, and the NaN and Infinity that
    Python's JSON reads and writes.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT
