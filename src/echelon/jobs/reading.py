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

from echelon.runs import Run

_BLOCK = 1 << 16
_LONGEST = 1 << 24
"""Longer lines are no lines, and are shown in pieces."""
_RECENT_STAMPS = 1 << 22
"""Bytes of stamps that are enough to order the last lines."""


class Line(NamedTuple):
    time: float
    """By when it was there."""
    log: str
    """The name of its file, without .log."""
    text: bytes
    """With its end, if it has one yet."""


class Log:
    """One file, read from where the last reading stopped."""

    def __init__(self, run: Run, name: str) -> None:
        self.path = run.logs / f"{name}.log"
        self.name = name
        self.at = 0

    def lines(self, rest: bool = False) -> Iterator[bytes]:
        """Whole lines that are new, and if wanted the one that is still being written."""
        held = b""
        for block in self.blocks():
            held += block
            end = len(held) if len(held) > _LONGEST else held.rfind(b"\n") + 1
            yield from _cut(held[:end])
            held = held[end:]
        if held and rest:
            yield held
        else:
            self.at -= len(held)

    def blocks(self) -> Iterator[bytes]:
        """Whatever is new."""
        size = _size(self.path)
        if size < self.at:
            self.at = 0  # another file under the same name
        while self.at < size:
            block = _read(self.path, self.at, min(_BLOCK, size - self.at))
            if not block:
                return
            self.at += len(block)
            yield block

    def skip_to_last(self, lines: int) -> None:
        """Be where so many lines are left, without reading those before."""
        self.at = _size(self.path)
        last = True
        while lines and self.at:
            start = max(0, self.at - _BLOCK)
            block = _read(self.path, start, self.at - start)
            end = len(block) - (last and block.endswith(b"\n"))  # the end of the last line
            while lines and (end := block.rfind(b"\n", 0, end)) >= 0:
                lines -= 1
            self.at = start + end + 1 if end >= 0 else start
            last = False


def merged(
    run: Run, logs: Sequence[Log], last: int | None = None, rest: bool = True
) -> Iterator[Line]:
    """In order of time, all lines or the last so many; the logs then stand at their ends."""
    if last is not None:
        for log in logs:
            log.skip_to_last(last)
    stamps = _stamps(run, None if last is None else _RECENT_STAMPS)
    streams = [_timed(log, stamps.get(log.name, []), rest) for log in logs]
    lines = heapq.merge(*streams, key=attrgetter("time"))
    yield from lines if last is None else deque(lines, maxlen=last)


def ranks_of(run: Run, node: int) -> set[int]:
    """The ranks whose logs the agent of a node watches."""
    names = {name for name, _ in _stamps_of(run.stamps_file(node), None)}
    return {int(n.removeprefix("rank-")) for n in names if n.startswith("rank-")}


Stamp = tuple[float, int]
"""When, and how large a log was by then."""


def _timed(log: Log, stamps: Sequence[Stamp], rest: bool) -> Iterator[Line]:
    """What was written after the last stamp was there when the file was last changed."""
    at, passed, newest, changed = log.at, 0, 0.0, _changed(log.path)
    for text in log.lines(rest):
        at += len(text)
        while passed < len(stamps) and stamps[passed][1] < at:
            passed += 1
        time = stamps[passed][0] if passed < len(stamps) else changed
        newest = max(newest, time)  # two machines' clocks may differ, the order in a file not
        yield Line(newest, log.name, text)


def _stamps(run: Run, limit: int | None) -> dict[str, list[Stamp]]:
    found: dict[str, list[Stamp]] = {}
    for path in run.logs.glob("node-*.stamps"):
        for name, stamp in _stamps_of(path, limit):
            found.setdefault(name, []).append(stamp)
    return found


def _stamps_of(path: Path, limit: int | None) -> Iterator[tuple[str, Stamp]]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0 if limit is None else max(0, _size(path) - limit))
        for line in file:
            with contextlib.suppress(ValueError):  # half of the first or of the last
                time, name, grown = line.decode().split()
                yield name, (float(time), int(grown))


def _cut(block: bytes) -> Iterator[bytes]:
    """At newlines alone: a carriage return, as in progress bars, is part of its line."""
    parts = block.split(b"\n")
    yield from (part + b"\n" for part in parts[:-1])
    if parts[-1]:
        yield parts[-1]


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _read(path: Path, start: int, size: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(size)
    return b""
