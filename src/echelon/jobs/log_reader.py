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
_MAX_LINE_BYTES = 1 << 24
"""Longer lines are shown in pieces."""
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
        partial = b""
        for block in self.read_blocks():
            partial += block
            end = len(partial) if len(partial) > _MAX_LINE_BYTES else partial.rfind(b"\n") + 1
            yield from _split_lines(partial[:end])
            partial = partial[end:]
        if partial and include_partial:
            yield partial
        else:
            self.offset -= len(partial)

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
    stamps = _read_all_stamps(run, None if last is None else _RECENT_STAMPS_BYTES)
    streams = [_add_times(log, stamps.get(log.name, []), include_partial) for log in logs]
    lines = heapq.merge(*streams, key=attrgetter("time"))
    yield from lines if last is None else deque(lines, maxlen=last)


def read_ranks_of_node(run: Run, node: int) -> set[int]:
    """Return the ranks whose logs the agent of a node watches."""
    names = {name for name, _ in _read_stamps(run.get_stamps_file(node), None)}
    return {int(n.removeprefix("rank-")) for n in names if n.startswith("rank-")}


LogStamp = tuple[float, int]
"""When, and how large a log was by then."""


def _add_times(
    log: LogFile, stamps: Sequence[LogStamp], include_partial: bool
) -> Iterator[LogLine]:
    """Yield the lines of a log with times by its stamps. What was written after the last stamp
    gets the time of the file's last change."""
    at, passed, newest, changed = log.offset, 0, 0.0, _get_modified_time(log.path)
    for text in log.read_lines(include_partial):
        at += len(text)
        while passed < len(stamps) and stamps[passed][1] < at:
            passed += 1
        time = stamps[passed][0] if passed < len(stamps) else changed
        newest = max(newest, time)  # two machines' clocks may differ, the order in a file not
        yield LogLine(newest, log.name, text)


def _read_all_stamps(run: Run, limit: int | None) -> dict[str, list[LogStamp]]:
    found: dict[str, list[LogStamp]] = {}
    for path in run.logs_folder.glob("node-*.stamps"):
        for name, stamp in _read_stamps(path, limit):
            found.setdefault(name, []).append(stamp)
    return found


def _read_stamps(path: Path, limit: int | None) -> Iterator[tuple[str, LogStamp]]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0 if limit is None else max(0, _get_size(path) - limit))
        for line in file:
            with contextlib.suppress(ValueError):  # half of the first or of the last
                time, name, grown = line.decode().split()
                yield name, (float(time), int(grown))


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
