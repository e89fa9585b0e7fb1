"""The process a run depends on: written down by itself, recognised by others, asked to end.

A number alone is not enough, because numbers are given again. With the time of its birth and the
boot it was born in, a process is never taken for another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.utils.processes import read_stat_fields


def make_starting_status(launcher: str, nodes: int, world: int) -> dict[str, Any]:
    """What a launcher writes into the status of a run that it is about to start from here."""
    return {
        "state": "starting",
        "launcher": launcher,
        "nodes": nodes,
        "world": world,
        "process": identify_this_process(),
        "job": None,
        "in_sweep": False,  # whether its job is a worker's, which has others to run after it
        "started": time.time(),
        "failure": None,
    }


def identify_this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "born": _read_birth(pid)}


def is_alive(process: object) -> bool | None:
    """None: it cannot be told from this machine."""
    if not isinstance(process, Mapping) or process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and _read_birth(pid) == process.get("born")


def send_signal(process: Mapping[str, Any], number: signal.Signals) -> bool:
    """Whether it was there to get the signal. The handle is taken before the look, so that what
    was looked at is what gets it."""
    try:
        handle = os.pidfd_open(process["pid"])
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def _read_birth(pid: int) -> str | None:
    """None when there is no such process, or only what is left of it."""
    fields = read_stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{fields[19]}@{boot}"
    return None
