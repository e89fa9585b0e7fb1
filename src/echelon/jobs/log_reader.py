"""The logs of a run as one stream: read in blocks, merged in order of time, continued as they grow.

Files are opened for one block at a time, because a world may have more ranks than a process may
have files open.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from echelon.runs.run_folder import Run

_BLOCK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20
"""Longer lines are shown in pieces, such as those of a progress bar that never ends its line."""
_RECENT_STAMPS_BYTES = 1 << 22
"""Bytes of stamps that are enough to order the last lines."""


class LogLine(NamedTuple):
    """One line of one log."""

    time: float
    """By when it was there."""
    log: str
    """The name of its file, without .log."""
    text: bytes
    """With its end, if it has one yet."""


class LogFile:
    """One log, read from where the last read stopped."""

    def __init__(self, run: Run, name: str) -> None:
        self.path = run.logs_folder / f"{name}.log"
        self.name = name
        self.offset = 0

    def read_lines(self, include_partial: bool = False) -> Iterator[bytes]:
        """Yield new lines, and with ``include_partial`` the one that is still being written."""
        partial: list[bytes] = []
        """Blocks without a line's end. Joined once: growing one text would copy it each time."""
        partial_bytes = 0
        for block in self.read_blocks():
            end = block.rfind(b"\n") + 1
            if not end and partial_bytes + len(block) >= _MAX_LINE_BYTES:
                end = len(block)
            if end:
                yield from _split_lines(b"".join([*partial, block[:end]]))
                partial, partial_bytes = [], 0
            if rest := block[end:]:
                partial.append(rest)
                partial_bytes += len(rest)
        if partial and include_partial:
            yield b"".join(partial)
        else:
            self.offset -= partial_bytes

    def read_blocks(self) -> Iterator[bytes]:
        """Yield whatever is new, in blocks."""
        size = _get_size(self.path)
        if size < self.offset:
            self.offset = 0  # another file under the same name
        while self.offset < size:
            block = _read_block(self.path, self.offset, min(_BLOCK_BYTES, size - self.offset))
            if not block:
                return
            self.offset += len(block)
            yield block

    def seek_to_last_lines(self, lines: int) -> None:
        """Move to where so many lines are left, without reading those before them."""
        self.offset = _get_size(self.path)
        last = True
        while lines and self.offset:
            start = max(0, self.offset - _BLOCK_BYTES)
            block = _read_block(self.path, start, self.offset - start)
            end = len(block) - (last and block.endswith(b"\n"))  # the end of the last line
            while lines and (end := block.rfind(b"\n", 0, end)) >= 0:
                lines -= 1
            self.offset = start + end + 1 if end >= 0 else start
            last = False


def merge_logs(
    run: Run, logs: Sequence[LogFile], last: int | None = None, include_partial: bool = True
) -> Iterator[LogLine]:
    """Yield lines of several logs by time, all or the last so many; the logs are then at their
    ends."""
    if last is not None:
        for log in logs:
            log.seek_to_last_lines(last)
    lines = _merge_by_stamps(
        run, logs, include_partial, None if last is None else _RECENT_STAMPS_BYTES
    )
    yield from lines if last is None else deque(lines, maxlen=last)


def _merge_by_stamps(
    run: Run, logs: Sequence[LogFile], include_partial: bool, limit: int | None
) -> Iterator[LogLine]:
    """Yield the lines of the logs in the order of their stamps, which are read as they are needed:
    a long run has more of them than fit into memory."""
    cursors = {log.name: _LineCursor(log, include_partial) for log in logs}
    for time, name, grown in _iterate_stamps(run, logs, limit):
        if cursor := cursors.get(name):
            for text in cursor.take_until(grown):
                yield LogLine(time, name, text)


def _iterate_stamps(run: Run, logs: Sequence[LogFile], limit: int | None) -> Iterator[LogStamp]:
    """Yield the stamps of all nodes by time, and for each log one for what was written after its
    last: it has the time of the file's last change."""
    paths = list(run.logs_folder.glob("node-*.stamps"))
    last_times: dict[str, float] = {}
    for path in paths:
        for time, name, _ in _read_stamps(path, limit):
            last_times[name] = max(time, last_times.get(name, 0.0))
    last_stamps = [
        LogStamp(max(_get_modified_time(log.path), last_times.get(log.name, 0.0)), log.name, None)
        for log in logs
    ]
    noted = [_read_stamps(path, limit) for path in paths]
    return heapq.merge(*noted, sorted(last_stamps, key=_get_time), key=_get_time)


class _LineCursor:
    """The lines of one log, taken up to a size."""

    def __init__(self, log: LogFile, include_partial: bool) -> None:
        self._end = log.offset
        self._lines = log.read_lines(include_partial)
        self._next: bytes | None = None

    def take_until(self, size: int | None) -> Iterator[bytes]:
        """Yield the lines that end within the first so many bytes of the log; None means all."""
        while (text := self._next or next(self._lines, None)) is not None:
            if size is not None and self._end + len(text) > size:
                self._next = text
                return
            self._next = None
            self._end += len(text)
            yield text


def read_ranks_of_node(run: Run, node: int) -> set[int]:
    """Return the ranks whose logs the agent of a node watches."""
    names = {name for _, name, _ in _read_stamps(run.get_stamps_file(node), None)}
    return {int(n.removeprefix("rank-")) for n in names if n.startswith("rank-")}


class LogStamp(NamedTuple):
    """When a log had which size; None means its present one."""

    time: float
    log: str
    size: int | None


_get_time = attrgetter("time")


def _read_stamps(path: Path, limit: int | None) -> Iterator[LogStamp]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0 if limit is None else max(0, _get_size(path) - limit))
        for line in file:
            with contextlib.suppress(ValueError):  # half of the first or of the last
                time, name, grown = line.decode().split()
                yield LogStamp(float(time), name, int(grown))


def _split_lines(block: bytes) -> Iterator[bytes]:
    """Yield lines, cut at newlines alone: a carriage return, as in progress bars, is part of its
    line."""
    parts = block.split(b"\n")
    yield from (part + b"\n" for part in parts[:-1])
    if parts[-1]:
        yield parts[-1]


def _get_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _get_modified_time(path: Path) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _read_block(path: Path, start: int, size: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(size)
    return b""
