"""The process that a run depends on: recorded by itself, recognised and signalled by others.

A process id alone is not enough, because ids are used again. With its start time and the boot it
was started in, a process is never taken for another.
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
    """What a launcher writes into the status of a run before it starts it from this process."""
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
    """The record of this process, as it goes into a run's status."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "born": _read_birth(pid)}


def is_alive(process: object) -> bool | None:
    """Whether the recorded process is running; None if that cannot be known from this machine."""
    if not isinstance(process, Mapping) or process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and _read_birth(pid) == process.get("born")


def send_signal(process: Mapping[str, Any], number: signal.Signals) -> bool:
    """Send a signal to the recorded process; returns whether it was there.

    The handle is opened before the check, so that the process that was checked is the one that gets
    the signal.
    """
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
    """Start time and boot of a process; None if it does not exist, or is a zombie."""
    fields = read_stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{fields[19]}@{boot}"
    return None
