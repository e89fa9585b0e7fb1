"""What the Linux kernel knows of processes and does for them."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
"""Loaded here and not when it is called: between fork and exec nothing should be loaded."""


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends.

    To be called in the child, for example as ``preexec_fn=partial(die_with_parent, os.getpid())``.
    The kernel means the thread that forked: the parent has to fork from a thread that stays.
    A process whose parent has ended before this call exits at once with code 1.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


OUTSIDE_PID_VARIABLE = "ECHELON_OUTSIDE_PID"
"""The process outside the container whose end is to be that of the agent inside. The words before
the agent's own set it, where the agent is no descendant of that process."""


def die_with_process(pid: int, name: str) -> None:
    """Have this process killed when another one ends, which is not its parent: a child waits for
    it. Nothing is done where there is no process of that id and name, since ids are others in a
    container with ids of its own."""
    try:
        if Path(f"/proc/{pid}/comm").read_bytes().strip() != os.fsencode(name):
            return
        watched = os.pidfd_open(pid)
    except OSError:
        return
    this_process = os.getpid()
    if os.fork() > 0:
        os.close(watched)
        return
    die_with_parent(this_process)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    select.select([watched], [], [])
    os.kill(this_process, signal.SIGKILL)
    os._exit(0)


def read_stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on, or None without such a process.

    The first is the state (``R``, ``S``, ``T``, ``Z`` …), index 19 the start time in clock ticks
    since boot. The name of the program comes before them and may hold spaces and parentheses, so
    the line is cut behind its last parenthesis.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def count_cores(processes: int, threads: int | None) -> int:
    """Return how many cores of this machine so many processes can use, with so many threads each;
    None: as many as there are."""
    cores = len(os.sched_getaffinity(0))
    return cores if threads is None else min(cores, processes * threads)


def list_ancestors(pid: int) -> list[int]:
    """Return the ids of a process's parent, that one's parent and so on, as far as they are seen
    from here."""
    ancestors: list[int] = []
    while (fields := read_stat_fields(pid)) is not None and (pid := int(fields[1])) > 0:
        ancestors.append(pid)
    return ancestors


def describe_process_state(pid: int) -> str:
    """Return what a process does, in words of the kernel; "" if it runs or sleeps as usual."""
    fields = read_stat_fields(pid)
    return "gone" if fields is None else _UNUSUAL_STATES.get(fields[0], "")


_UNUSUAL_STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a driver, and cannot be interrupted",
    "Z": "dead",
    "X": "dead",
}


def is_signal_caught(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return _has_signal(f"/proc/{pid}/status", "SigCgt", number)


def list_blocking_threads(pid: int, number: int) -> set[str]:
    """Return the threads of a process in which a signal is blocked. While a handler runs, its own
    signal is."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {t for t in threads if _has_signal(f"/proc/{pid}/task/{t}/status", "SigBlk", number)}


def _has_signal(status_file: str, mask: str, number: int) -> bool:
    """Return whether a signal is in a mask of ``/proc/PID/status``."""
    try:
        with open(status_file, encoding="utf-8", errors="replace") as file:
            words = next(line.split() for line in file if line.startswith(f"{mask}:"))
    except (OSError, StopIteration):
        return False
    return bool(int(words[1], 16) >> (number - 1) & 1)
