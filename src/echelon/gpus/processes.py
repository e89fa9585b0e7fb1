"""What /proc shows about a process: its user, age, command, Slurm job and Echelon run.

The command and the user can be read of every process; everything else needs the rights of its
owner. What cannot be read is None.

The text of this file is also sent to other machines (see ``remote.py``), so it imports nothing
outside the standard library and runs on Python 3.9.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from contextlib import suppress
from typing import Any, NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATUS_FILE, _CONFIG_FILE = "status.json", "config.json"
"""Names in the folder of a run. The package ``runs`` owns them, but it is not on the machines that
this file is sent to."""
_ACTIVE_STATES = ("starting", "running", "queued", "requeued")
_EXIT_GRACE_S = 10.0
"""How long a rank may take to exit after its run has written its last status."""
_INITIAL_PID_NAMESPACE = 0xEFFF_FFFC
"""The inode number that Linux gives to the PID namespace of the host (PROC_PID_INIT_INO)."""


class ProcessInfo(NamedTuple):
    """What rarely changes while a process lives."""

    start_ticks: int
    """Clock ticks from boot to its start. With the PID it identifies a process for good, because
    PIDs are used again."""
    user: str
    command: str
    job: str | None
    """The ID of its Slurm job."""
    run_folder: str | None
    """The folder of the Echelon run that it belongs to."""
    age_when_read_s: float

    def is_up_to_date(self) -> bool:
        """Return whether this need not be read again yet.

        A young process may still exec another program or open the folder of its run, so it is
        read again each time its age has doubled.
        """
        return self.compute_age_s() < 2 * self.age_when_read_s + 2

    def compute_age_s(self) -> float:
        """Return the seconds since the process started."""
        return _compute_age_s(self.start_ticks)


def read_start_ticks(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if it does not exist."""
    fields = _read_stat_fields(pid)
    return int(fields[19]) if fields else None


def read_parent_pid(pid: int) -> int | None:
    """Return the PID of the parent of a process; None if the process does not exist."""
    fields = _read_stat_fields(pid)
    return int(fields[1]) if fields else None


def read_process_info(pid: int) -> ProcessInfo | None:
    """Return what is known about a process that the driver lists with this PID.

    None means that it is not visible from here: it has ended, or it runs outside of the PID
    namespace of this container. NVML reports host PIDs; inside a container the same number may
    belong to another process, recognized by its having no NVIDIA device file open.
    """
    start_ticks = read_start_ticks(pid)
    if start_ticks is None:
        return None
    files = _list_open_files(pid)
    has_gpu_open = any(file.startswith("/dev/nvidia") for file in files)
    if _is_in_pid_namespace() and files and not has_gpu_open:
        return None
    return ProcessInfo(
        start_ticks,
        _read_user(pid),
        _read_command(pid),
        read_slurm_job(pid),
        _find_run_folder(files),
        _compute_age_s(start_ticks),
    )


def look_up_user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without an account here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _compute_age_s(start_ticks: int) -> float:
    # BOOTTIME counts suspended time too, as the start time in /proc does.
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / _TICKS_PER_S)


def _read_user(pid: int) -> str:
    for line in (_read_proc_file(pid, "status") or b"").splitlines():
        if line.startswith(b"Uid:"):
            return look_up_user_name(int(line.split()[1]))
    return "?"


def _read_command(pid: int) -> str:
    """Return the command line with the program's base name; ``[name]`` for a kernel thread."""
    words = (_read_proc_file(pid, "cmdline") or b"").replace(b"\0", b" ").strip()
    if not words:
        return f"[{_make_printable(_read_proc_file(pid, 'comm') or b'?')}]"
    # setproctitle writes the whole title into the first argument; its spaces end the program.
    program, space, rest = words.partition(b" ")
    return _make_printable((os.path.basename(program) or program) + space + rest)


def _make_printable(raw: bytes) -> str:
    """Return one line without control characters: a title may contain terminal escapes."""
    text = " ".join(raw.decode(errors="replace").split())
    return "".join(character if character.isprintable() else "?" for character in text)


def read_slurm_job(pid: int) -> str | None:
    """Return the job's ID, for a task of an array ``ARRAY_TASK``.

    The environment of other users' processes cannot be read, but their control group can.
    """
    variables = dict(
        pair.split(b"=", 1)
        for pair in (_read_proc_file(pid, "environ") or b"").split(b"\0")
        if pair.startswith(b"SLURM_") and b"=" in pair
    )
    if array := variables.get(b"SLURM_ARRAY_JOB_ID"):
        return _make_printable(array + b"_" + variables.get(b"SLURM_ARRAY_TASK_ID", b"?"))
    if job := variables.get(b"SLURM_JOB_ID"):
        return _make_printable(job)
    match = re.search(rb"/job_(\d+)", _read_proc_file(pid, "cgroup") or b"")
    return match[1].decode() if match else None


def _list_open_files(pid: int) -> list[str]:
    files = []
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed in the meantime
                files.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return files


def _find_run_folder(files: list[str]) -> str | None:
    """Return the run whose files a process has open: every rank has its log or heartbeat open."""
    folders = {os.path.dirname(file) for file in files if file.startswith("/")}
    for folder in sorted(folders):
        run = os.path.dirname(folder) if folder.endswith("/logs") else folder
        if os.path.exists(f"{run}/{_STATUS_FILE}") and os.path.exists(f"{run}/{_CONFIG_FILE}"):
            return run
    return None


def _is_in_pid_namespace() -> bool:
    """Return whether this process sees other PIDs than the host, as in a container."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE
    return False


def _read_stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process.

    The program's name comes before them in parentheses and may contain spaces and parentheses.
    """
    stat = _read_proc_file(pid, "stat")
    return stat.rpartition(b")")[2].split() if stat else []


def _read_proc_file(pid: int, name: str) -> bytes | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


# --- orphans: processes whose run is over ---


class RunStatusCache:
    """Tells whether runs are over; a status file is parsed again only when it has changed."""

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[int, dict[str, Any]]] = {}
        """By run folder: the modification time of the status file, and its content."""

    def is_run_over(self, folder: str) -> bool:
        """Return whether a process that still works for this run is an orphan."""
        status = self._read_status(folder)
        if status.get("state") in _ACTIVE_STATES:
            return _has_run_process_ended(status.get("process"))
        updated = status.get("updated")
        return isinstance(updated, (int, float)) and time.time() - updated > _EXIT_GRACE_S

    def _read_status(self, folder: str) -> dict[str, Any]:
        path, parsed = f"{folder}/{_STATUS_FILE}", self._parsed.get(folder, (0, {}))
        with suppress(OSError, ValueError):
            modified_ns = os.stat(path).st_mtime_ns
            if modified_ns != parsed[0]:
                with open(path, encoding="utf-8") as file:
                    parsed = self._parsed[folder] = (modified_ns, dict(json.load(file)))
        return parsed[1]


def _has_run_process_ended(process: object) -> bool:
    """Return whether the process that leads a run has ended without writing a final status.

    False if it runs on another machine, where it cannot be looked up.
    """
    if not isinstance(process, dict) or process.get("host") != os.uname().nodename:
        return False
    pid, start_ticks = process.get("pid"), str(process.get("born")).partition("@")[0]
    return isinstance(pid, int) and str(read_start_ticks(pid)) != start_ticks
