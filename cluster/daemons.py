"""Daemons run in the foreground under our own pid files, each on one host of the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import network
from layout import Layout
from shell import Broken, wait_until

# The daemon's process writes the file itself, before it becomes the daemon: no moment is left in
# which it runs and is not known. The start time tells it from a later process of the same id.
RECORDED = 'echo "$$ $(cut -d" " -f22 /proc/$$/stat)" >"$0" && exec "$@"'


def start(layout: Layout, name: str, host: str, *command: str, **env: str) -> None:
    """Start a daemon that is not running."""
    if alive(layout, name):
        return
    file, log = layout.pid_file(name), layout.log(name)
    for folder in (file.parent, log.parent):
        folder.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    with log.open("a") as output:
        subprocess.Popen(
            network.on_host(host, "sh", "-c", RECORDED, str(file), *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "LANG": "C.UTF-8", **env},
        )
    if not wait_until(file.exists, limit_s=10):
        raise Broken(f"{name} did not start\n{tail(layout, name)}")


def alive(layout: Layout, name: str) -> bool:
    """Return whether a daemon runs."""
    return _pid(layout.pid_file(name)) is not None


def stop(layout: Layout, name: str, with_signal: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal, and SIGKILL if the daemon does not end."""
    for each in (with_signal, signal.SIGKILL):
        pid = _pid(layout.pid_file(name))
        if pid is None:
            break
        with suppress(ProcessLookupError):
            os.kill(pid, each)
        wait_until(lambda: not alive(layout, name), limit_s=15)
    layout.pid_file(name).unlink(missing_ok=True)


def ready(layout: Layout, name: str, condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until a condition holds; raise with the end of the log if the daemon ends before."""

    def settled() -> bool:
        return condition() or not alive(layout, name)

    in_time = wait_until(settled, limit_s)
    if not alive(layout, name):
        raise Broken(f"{name} ended\n{tail(layout, name)}")
    if not in_time:
        raise Broken(f"{name} was not ready within {limit_s:g} s\n{tail(layout, name)}")


def tail(layout: Layout, name: str, lines: int = 20) -> str:
    """Return the last lines of a daemon's log, for an error message."""
    log = layout.log(name)
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"the end of {log}:\n" + "\n".join(text.splitlines()[-lines:])


def _pid(file: Path) -> int | None:
    """Return the process of a pid file, if it is the one that wrote it and still runs."""
    try:
        pid, started = file.read_text().split()
        state, *fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return int(pid) if fields[18] == started and state != "Z" else None
