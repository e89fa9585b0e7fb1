"""A rank's heartbeat: a row of a small file that its agent maps. A beat costs a microsecond.

Before the rows the agent writes two numbers for its ranks: those of the last round that they are to
join at a step boundary, and of the last one that began because a rank was lost."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<QQ")
_ROW = struct.Struct("<QQd")


class HeartbeatRecord(NamedTuple):
    """The last heartbeat of a rank."""

    beats: int
    """A beat is a forward pass, a step, an evaluated batch; 0: at work that may take any time."""
    step: int
    time: float
    """time.monotonic() of the machine."""


class Heartbeat:
    """Writes the row of one rank; without a file, beats go nowhere."""

    def __init__(self, path: Path | None = None, row: int = 0) -> None:
        self._map = _map_file(path) if path is not None else None
        self._offset = _get_row_offset(row)
        self._beats = 0
        self._suspended_beats = 0
        self.step = 0

    @property
    def planned_round(self) -> int:
        """The number of the last round that was planned; 0: none was."""
        return 0 if self._map is None else int(_HEAD.unpack_from(self._map)[0])

    @property
    def unplanned_round(self) -> int:
        """The number of the last round that began because a rank was lost; 0: none was."""
        return 0 if self._map is None else int(_HEAD.unpack_from(self._map)[1])

    def beat(self) -> None:
        """Tell the agent that this rank is alive, unless beats are suspended."""
        if self._suspended_beats:
            self._suspended_beats -= 1
        elif self._map is not None:
            self._beats += 1
            _ROW.pack_into(self._map, self._offset, self._beats, self.step, time.monotonic())

    def suspend(self, beats: int = 0) -> None:
        """Announce work that may take any time: the rank is not called hung until the next beat,
        or until so many beats later."""
        self._suspended_beats = beats
        if self._map is not None:
            _ROW.pack_into(self._map, self._offset, 0, self.step, time.monotonic())


class HeartbeatTable:
    """The agent's side: creates the file and reads all rows."""

    def __init__(self, path: Path, ranks: int) -> None:
        # A new file: the agent of a submitted command may have the old one mapped, and would be
        # killed by the kernel if it read that while it is empty.
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(_get_row_offset(ranks)))
        self._map = _map_file(path)
        self._ranks = ranks

    def read_all(self) -> list[HeartbeatRecord]:
        """Return the last heartbeat of every rank."""
        return [
            HeartbeatRecord(*_ROW.unpack_from(self._map, _get_row_offset(r)))
            for r in range(self._ranks)
        ]

    def clear(self, row: int) -> None:
        """Forget the heartbeats of a rank whose place another process takes."""
        _ROW.pack_into(self._map, _get_row_offset(row), 0, 0, 0.0)

    def write_round(self, number: int, is_planned: bool) -> None:
        """Ask the ranks to go over to this round: at a step boundary, or at once. They begin it
        with the time that a first step is given."""
        for row in range(self._ranks):
            _, step, time_s = _ROW.unpack_from(self._map, _get_row_offset(row))
            if time_s and not is_planned:
                _ROW.pack_into(self._map, _get_row_offset(row), 0, step, time.monotonic())
        planned, unplanned = _HEAD.unpack_from(self._map)
        _HEAD.pack_into(self._map, 0, *((number, unplanned) if is_planned else (planned, number)))


def read_progress(path: Path) -> tuple[int, int]:
    """Return the newest step in a file of heartbeats and the sum of its beats, for a reader that
    maps nothing and knows no ranks; zeros where there is none."""
    try:
        rows = path.read_bytes()[_HEAD.size :]
    except OSError:
        return 0, 0
    records = [*_ROW.iter_unpack(rows[: len(rows) // _ROW.size * _ROW.size])]
    return max((step for _, step, _ in records), default=0), sum(beats for beats, _, _ in records)


def _get_row_offset(row: int) -> int:
    return _HEAD.size + row * _ROW.size


def _map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
