"""Whether anybody uses a job on this node: its processes, its GPUs, or a terminal.

It reads /proc, and imports nothing that would take long on a node.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

from echelon.gpus.availability import list_visible_gpus
from echelon.gpus.nvml import NvmlError, open_nvml
from echelon.gpus.processes import read_slurm_job
from echelon.utils.processes import read_stat_fields

_BUSY_SHARE = 0.05
"""Of one CPU, by one process. Less is that of a notebook or an editor that waits for somebody."""
_BUSY_GPU_PERCENT = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ActivityMonitor:
    """Compares the processes of a job at one moment with those at the moment before."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ticks: dict[tuple[int, str], int] = {}
        """By process id and start time: the CPU time of a process and of children that ended."""
        self._inputs: dict[str, int] = {}
        """By terminal: when something was last read from it, by the kernel's clock."""
        self._sampled_s: float | None = None

    def sample(self) -> bool:
        """Return whether the job was used since the last call. The first call says yes."""
        now = time.monotonic()
        ticks: dict[tuple[int, str], int] = {}
        inputs: dict[str, int] = {}
        for pid in self._iter_processes():
            if (fields := read_stat_fields(pid)) is None:
                continue
            ticks[pid, fields[19]] = sum(map(int, fields[11:15]))
            for terminal in find_terminals(pid) if fields[4] != "0" else ():
                with contextlib.suppress(OSError):
                    inputs[terminal] = os.stat(terminal).st_atime_ns
        is_first, elapsed_s = self._sampled_s is None, now - (self._sampled_s or now)
        busy_ticks = _BUSY_SHARE * elapsed_s * _TICKS_PER_S
        is_busy = any(
            used - self._ticks.get(process, 0) > busy_ticks for process, used in ticks.items()
        )
        has_input = any(moment != self._inputs.get(name) for name, moment in inputs.items())
        self._ticks, self._inputs, self._sampled_s = ticks, inputs, now
        return is_first or is_busy or has_input or are_gpus_busy()

    def list_terminals(self) -> set[str]:
        """Return the terminals that processes of the job have open on this node."""
        return {terminal for pid in self._iter_processes() for terminal in find_terminals(pid)}

    def hang_up_terminals(self) -> None:
        """Tell processes at a terminal that it is gone. An interactive shell ignores TERM, so Slurm
        would keep the nodes for another half a minute before it kills it."""
        for pid in self._iter_processes():
            fields = read_stat_fields(pid)
            if fields is not None and fields[4] != "0":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGHUP)

    def _iter_processes(self) -> Iterator[int]:
        """Yield the processes of this user in the job, without this one."""
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid() and (
                    read_slurm_job(int(name)) == self._job
                ):
                    yield int(name)


def find_terminals(pid: int) -> set[str]:
    """Return the terminals that a process has open as its input or output."""
    found = set()
    for number in range(3):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            if re.fullmatch(r"/dev/(pts/\d+|tty\d+)", target):
                found.add(target)
    return found


def are_gpus_busy() -> bool:
    """Return whether a GPU of this job computes; False where there is none, or no NVML."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return False  # of a job without GPUs all of the node's would be seen
    with contextlib.suppress(NvmlError), open_nvml() as nvml:
        for index in list_visible_gpus(os.environ):
            if (nvml.open_device(index).read_use_percent() or 0) >= _BUSY_GPU_PERCENT:
                return True
    return False
