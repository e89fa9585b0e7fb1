"""A rank's heartbeat: a row of a small file that its agent maps. A beat costs a microsecond."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

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
        self._offset = row * _ROW.size
        self._beats = 0
        self._suspended_beats = 0
        self.step = 0

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
        path.write_bytes(bytes(_ROW.size * ranks))
        self._map = _map_file(path)
        self._ranks = ranks

    def read_all(self) -> list[HeartbeatRecord]:
        """Return the last heartbeat of every rank."""
        return [
            HeartbeatRecord(*_ROW.unpack_from(self._map, r * _ROW.size)) for r in range(self._ranks)
        ]


def _map_file(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
