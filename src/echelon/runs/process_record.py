"""The process that a run depends on: recorded by itself, recognised by others, sent signals.

A process id alone is not enough, because ids are reused. With the start time and the boot id a
process is never taken for another.
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


def make_starting_status(launcher: str, nodes: int | None, world: int | None) -> dict[str, Any]:
    """Return what is written into the status of a run that is started from this process; None is
    a size that is not known yet."""
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
    """Return host, id and start time of this process, as JSON data."""
    return identify_process(os.getpid())


def identify_process(pid: int) -> dict[str, Any]:
    """Return host, id and start time of a process of this machine, as JSON data."""
    return {"host": socket.gethostname(), "pid": pid, "born": _read_start_time(pid)}


def is_alive(process: object) -> bool | None:
    """Return whether a recorded process still runs; None if that cannot be known from this
    machine."""
    if not isinstance(process, Mapping) or process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and _read_start_time(pid) == process.get("born")


def send_signal(process: Mapping[str, Any], number: signal.Signals) -> bool:
    """Send a signal to a recorded process, and return whether it was there. The handle is opened
    before the identity is checked, so that the process that was checked is the one that gets the
    signal."""
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


def _read_start_time(pid: int) -> str | None:
    """Start time and boot of a process; None if it does not exist, or is a zombie."""
    fields = read_stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{fields[19]}@{boot}"
    return None
