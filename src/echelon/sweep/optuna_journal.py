"""Optuna's journal in a file that survives kills: the same lines, written otherwise.

Optuna's own backend is not used. Its lock is a file that stays behind when its holder is killed:
every worker then waits 30 s for it, and several may break it at once. And half a line, which a
killed writer leaves, makes its journal unreadable for good.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from echelon.sweep.sweep_folder import SweepLock
from echelon.utils.files import flush_to_disk


class SweepJournal(BaseJournalBackend):
    """A file with one line of JSON per change, appended under the lock of the sweep."""

    def __init__(self, path: Path, lock: SweepLock) -> None:
        self._path, self._lock = path, lock
        self._read_position = (0, 0)
        """A number of lines, and the byte at which they end: reading resumes there."""
        if not path.exists():
            path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the entries from a number on, without a last line that is half written."""
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
        """Append entries, after what a killed writer may have left."""
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
        """Write through to the disk. Called once per change of a trial, not once per line."""
        flush_to_disk(self._path)


def _truncate_partial_line(handle: int) -> None:
    """Cut off the half line that a killed writer has left."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    start = max(0, size - (1 << 20))
    cut = os.pread(handle, size - start, start).rfind(b"\n")
    os.ftruncate(handle, start + cut + 1)
