"""Optuna's journal in a file of ours: the same lines, safe from kills.

Optuna's own file leaves a lock behind when its holder is killed, and half a line makes it
unreadable for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from echelon.sweep.lock import SweepLock
from echelon.utils.files import flush_to_disk


class SweepJournal(BaseJournalBackend):
    def __init__(self, path: Path, lock: SweepLock) -> None:
        self._path, self._lock = path, lock
        self._read_position = (0, 0)
        """So many lines end at this byte."""
        if not path.exists():
            path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Whole lines only: who writes is perhaps at it."""
        number, offset = (
            self._read_position if self._read_position[0] <= log_number_from else (0, 0)
        )
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, offset = number + 1, offset + len(line)
                self._read_position = (number, offset)
                if number > log_number_from:
                    yield json.loads(line)

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._lock:
            handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                _truncate_partial_line(handle)
                written = 0
                while written < len(lines):
                    written += os.write(handle, lines[written:])
            finally:
                os.close(handle)

    def flush(self) -> None:
        """To the disk, once per change of a trial and not once per line."""
        flush_to_disk(self._path)


def _truncate_partial_line(handle: int) -> None:
    """Cut off half a line, which a process killed while writing has left."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    start = max(0, size - (1 << 20))
    cut = os.pread(handle, size - start, start).rfind(b"\n")
    os.ftruncate(handle, start + cut + 1)
