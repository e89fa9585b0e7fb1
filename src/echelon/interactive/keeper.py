"""The keeper of an allocation: the batch script of `echelon dev`, on its first node.

It says in the folder of the allocation where the job is, and ends the job when nobody has used it
for a while: when no process of the user in the job has used a CPU or a GPU, and nothing was typed.
With several nodes a step of its own watches each of them. A minute or two before an end it says so
on the terminals. On request it starts an sshd of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from echelon.interactive.activity import ActivityMonitor
from echelon.interactive.allocation import AllocationFolder, select_job_variables
from echelon.interactive.own_sshd import OwnSshd
from echelon.utils.files import write_json_atomically, write_text_atomically

_SAMPLE_S = 10.0
_TICK_S = 0.2
_SUSPENDED_S = 60.0
"""A look that is so late was not held up by a busy machine alone."""
_WARNING_S = 120.0
"""How long before the end of an idle allocation its terminals hear of it."""


class IdleWatcher:
    """Watches one job, from its start to its end."""

    def __init__(self, files: AllocationFolder, idle_s: float, env: dict[str, str]) -> None:
        self._files, self._idle_s = files, idle_s
        self._job = env["SLURM_JOB_ID"]
        self._variables = select_job_variables(env)
        self._monitor = ActivityMonitor(self._job)
        self._sample_s = min(_SAMPLE_S, idle_s / 5)
        self._warning_s = min(_WARNING_S, idle_s / 3)
        self._used_s = self._looked_s = time.monotonic()
        """When it was last seen in use, and last looked at."""
        self._counts: dict[Path, str] = {}
        self._has_warned = False
        self._is_time_short = False
        self._sshd = OwnSshd(files, env)
        node_count = int(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or 1)
        self._state: dict[str, Any] = {
            "job": self._job,
            "node": env.get("SLURMD_NODENAME") or os.uname().nodename,
            "nodes": env.get("SLURM_JOB_NODELIST", ""),
            "node_count": node_count,
            "cpus": int(env.get("SLURM_CPUS_ON_NODE") or 1),
            "idle_limit_s": idle_s,
            "started": time.time(),
        }

    def announce_short_time(self) -> None:
        """Note that the time limit is near. A signal handler calls it."""
        self._is_time_short = True

    def run(self) -> int:
        """Watch until the job has not been used for too long, or somebody has ended it."""
        self._write_variables()
        reporters = self._start_reporters()
        try:
            while not (self._is_ended() or self._has_been_idle()):
                self._wait_until(time.monotonic() + self._sample_s)
        finally:
            self._sshd.stop()
            if reporters is not None:
                reporters.terminate()
        if not self._is_ended():
            why = f"nobody used it for {self._idle_s / 60:g} minutes"
            with contextlib.suppress(OSError):
                self._files.ended_file.write_text(f"{why}\n", encoding="utf-8")
            self._tell_terminals(f"this allocation ends: {why}")
            print(f"job {self._job} ends: {why}", flush=True)
        self._monitor.hang_up_terminals()
        return 0

    def _write_variables(self) -> None:
        """Write the variables for the shells, before anybody is told that the job runs."""
        lines = [f"export {k}={shlex.quote(v)}" for k, v in sorted(self._variables.items())]
        write_text_atomically(self._files.variables_file, "\n".join([*lines, ""]), names_code=True)

    def _has_been_idle(self) -> bool:
        """Look at the job, and return whether it has been idle for too long."""
        now = time.monotonic()
        # Nobody can use a job while Slurm has suspended it.
        was_suspended = now > self._looked_s + self._sample_s + _SUSPENDED_S
        self._looked_s = now
        # All, also if one says yes: each look is compared with the one before.
        if any([self._monitor.sample(), self._has_activity_elsewhere(), was_suspended]):
            self._used_s, self._has_warned = now, False
        idle_s = now - self._used_s
        state = self._state | {"idle_s": round(idle_s, 1), "ssh": self._sshd.describe()}
        with contextlib.suppress(OSError):  # a full disk does not end anybody's work
            write_json_atomically(self._files.state_file, state)
        left_s = self._idle_s - idle_s
        if left_s <= self._warning_s and not self._has_warned:
            self._has_warned = True
            self._tell_terminals(
                f"nobody uses this allocation; it ends in {max(left_s, 0):.0f} s, unless you type "
                "something"
            )
        return left_s <= 0

    def _is_ended(self) -> bool:
        """Return whether `echelon dev --end` was typed. Slurm ends the steps of the job first, and
        would have its script wait for half a minute."""
        return self._files.ended_file.exists()

    def _has_activity_elsewhere(self) -> bool:
        """Return whether a node has counted an activity since the last look."""
        counts = {}
        for file in self._files.folder.glob("activity-*"):
            with contextlib.suppress(OSError):
                counts[file] = file.read_text(encoding="utf-8")
        has_changed = counts != self._counts
        self._counts = counts
        return has_changed

    def _wait_until(self, deadline_s: float) -> None:
        """Sleep, but answer a request for an sshd and the signal at once."""
        while time.monotonic() < deadline_s:
            if self._is_time_short:
                self._is_time_short = False
                self._tell_terminals("the time limit of this allocation is near: save your work")
            if self._is_ended() or self._sshd.serve_request():
                return
            time.sleep(_TICK_S)

    def _start_reporters(self) -> subprocess.Popen[bytes] | None:
        """Start a step that watches every node, where there are several."""
        count = self._state["node_count"]
        if count < 2:
            return None
        each = ["--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        keeper = [sys.executable, "-m", "echelon.interactive.keeper", str(self._files.folder)]
        every = f"{self._sample_s:g}"
        return subprocess.Popen(
            ["srun", "--export=ALL", *each, *keeper, "--report-s", every], stdin=subprocess.DEVNULL
        )

    def _tell_terminals(self, text: str) -> None:
        for terminal in self._monitor.list_terminals():
            with contextlib.suppress(OSError):
                # A terminal that takes nothing must not hold up the end of the job.
                handle = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    os.write(handle, f"\r\nechelon dev: {text}\r\n".encode())
                finally:
                    os.close(handle)


def report_activity(folder: Path, job: str, every_s: float) -> None:
    """Count in a file of this node how often the job was used on it, until this process is ended.

    A count and no time is told: the clocks of nodes differ.
    """
    monitor, count = ActivityMonitor(job), 0
    file = folder / f"activity-{os.environ.get('SLURMD_NODENAME') or os.uname().nodename}"
    while True:
        if monitor.sample():
            count += 1
            with contextlib.suppress(OSError):
                file.write_text(str(count), encoding="utf-8")
        time.sleep(every_s)


def main() -> int:
    """Be the keeper, or what it starts on each node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--idle-s", type=float)
    parser.add_argument("--report-s", type=float)
    given = parser.parse_args()
    if given.report_s is not None:
        report_activity(given.folder, os.environ["SLURM_JOB_ID"], given.report_s)
    files = AllocationFolder(given.folder.name, given.folder)
    keeper = IdleWatcher(files, given.idle_s, dict(os.environ))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # by way of `finally`
    signal.signal(signal.SIGUSR2, lambda number, frame: keeper.announce_short_time())
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
