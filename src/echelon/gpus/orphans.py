"""Whether the run that a process belongs to is over, so that the process is left over."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

from echelon.gpus.processes import STATUS_FILE, read_start_ticks

_EXIT_GRACE_S = 10.0
"""A rank that has said its last word still needs a moment to end."""
_ACTIVE_STATES = ("starting", "running", "queued", "requeued")


class RunStatusCache:
    """What the folders of runs say, read again when it has changed."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, dict[str, Any]]] = {}

    def is_run_over(self, folder: str) -> bool:
        status = self._read_status(folder)
        if status.get("state") in _ACTIVE_STATES:
            return _has_process_ended(status.get("process"))
        updated = status.get("updated")
        return isinstance(updated, (int, float)) and time.time() - updated > _EXIT_GRACE_S

    def _read_status(self, folder: str) -> dict[str, Any]:
        file, known = f"{folder}/{STATUS_FILE}", self._read.get(folder, (0, {}))
        with suppress(OSError, ValueError):
            changed = os.stat(file).st_mtime_ns
            if changed != known[0]:
                with open(file, encoding="utf-8") as opened:
                    known = self._read[folder] = (changed, dict(json.load(opened)))
        return known[1]


def _has_process_ended(process: object) -> bool:
    """The one that holds the run together; of another machine's it cannot be told."""
    if not isinstance(process, dict) or process.get("host") != os.uname().nodename:
        return False
    pid, began = process.get("pid"), str(process.get("born")).partition("@")[0]
    return isinstance(pid, int) and str(read_start_ticks(pid)) != began
