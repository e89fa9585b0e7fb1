"""What /proc tells of a process: whose it is, since when, what it runs, and for whom.

Everything but its command and its user needs its owner's rights; what cannot be read is None.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from contextlib import suppress
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STATUS_FILE, CONFIG_FILE = "status.json", "config.json"
"""Of a run. `runs` has all its names, but this file goes to machines without Echelon."""
_INITIAL_PID_NAMESPACE = 0xEFFF_FFFC
"""The number that Linux gives to the namespace of all processes."""


class ProcessInfo(NamedTuple):
    """What hardly changes while a process lives."""

    start_ticks: int
    """In ticks since the machine started; with its number, a process is never taken for another."""
    user: str
    command: str
    job: str | None
    run_folder: str | None

    age_when_read_s: float
    """How old it was then."""

    def is_up_to_date(self) -> bool:
        """A young process may yet become another program, or open the folder of its run; so it is
        read again whenever it has become twice as old."""
        return self.compute_age_s() < 2 * self.age_when_read_s + 2

    def compute_age_s(self) -> float:
        return _compute_age_s(self.start_ticks)


def read_start_ticks(pid: int) -> int | None:
    """None: there is no such process here."""
    stat = _read_proc_file(pid, "stat")
    return int(stat.rpartition(b")")[2].split()[19]) if stat else None


def read_parent_pid(pid: int) -> int | None:
    stat = _read_proc_file(pid, "stat")
    return int(stat.rpartition(b")")[2].split()[1]) if stat else None


def read_process_info(pid: int) -> ProcessInfo | None:
    begun = read_start_ticks(pid)
    if begun is None:
        return None
    files = _list_open_files(pid)
    if (
        _is_in_pid_namespace()
        and files
        and not any(file.startswith("/dev/nvidia") for file in files)
    ):
        return None  # the driver means a process outside, which has the same number there
    known = (_read_user(pid), _read_command(pid), _read_slurm_job(pid), _find_run_folder(files))
    return ProcessInfo(begun, *known, age_when_read_s=_compute_age_s(begun))


def _compute_age_s(born: int) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born / _TICKS_PER_S)


def look_up_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_user(pid: int) -> str:
    for line in (_read_proc_file(pid, "status") or b"").splitlines():
        if line.startswith(b"Uid:"):
            return look_up_user_name(int(line.split()[1]))
    return "?"


def _read_command(pid: int) -> str:
    """In one line of letters: what a process calls itself may hold a terminal's commands."""
    words = (_read_proc_file(pid, "cmdline") or b"").replace(b"\0", b" ").strip()
    if not words:
        return f"[{_make_printable(_read_proc_file(pid, 'comm') or b'?')}]"
    # A process that gives itself a title puts all of it into its first word.
    program, space, rest = words.partition(b" ")
    return _make_printable((os.path.basename(program) or program) + space + rest)


def _make_printable(raw: bytes) -> str:
    text = " ".join(raw.decode(errors="replace").split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read_slurm_job(pid: int) -> str | None:
    """By its variables; those of others cannot be read, but its control group can."""
    variables = dict(
        pair.split(b"=", 1)
        for pair in (_read_proc_file(pid, "environ") or b"").split(b"\0")
        if pair.startswith(b"SLURM_") and b"=" in pair
    )
    if array := variables.get(b"SLURM_ARRAY_JOB_ID"):
        return _make_printable(array + b"_" + variables.get(b"SLURM_ARRAY_TASK_ID", b"?"))
    if job := variables.get(b"SLURM_JOB_ID"):
        return _make_printable(job)
    found = re.search(rb"/job_(\d+)", _read_proc_file(pid, "cgroup") or b"")
    return found[1].decode() if found else None


def _list_open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def _find_run_folder(files: list[str]) -> str | None:
    """Every rank of a run has a file of its folder open: its log, its pulse, or the metrics."""
    folders = {os.path.dirname(file) for file in files if file.startswith("/")}
    for folder in sorted(folders):
        run = os.path.dirname(folder) if folder.endswith("/logs") else folder
        if os.path.exists(f"{run}/{STATUS_FILE}") and os.path.exists(f"{run}/{CONFIG_FILE}"):
            return run
    return None


def _is_in_pid_namespace() -> bool:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE
    return False


def _read_proc_file(pid: int, name: str) -> bytes | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None
