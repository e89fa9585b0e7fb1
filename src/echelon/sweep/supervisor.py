"""The supervisor of the workers on this machine: it starts, replaces and stops them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.gpus import count_visible_gpus
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import ENDED_STATES, TrialStore
from echelon.utils.processes import die_with_parent

_POLL_S = 0.2
_MAX_FAILURES_IN_A_ROW = 5
"""The sweep ends after so many workers failed without a result in between."""


def supervise_workers(
    sweep: SweepFolder, parallel: int, on_update: Callable[[TrialStore], None]
) -> int:
    """Run workers until the sweep is over or stopped by a signal, and return the exit code.

    `on_update` is called with the trials several times a second.
    """
    store = TrialStore(sweep)
    pool = _WorkerPool(sweep, parallel)
    before = {n: signal.signal(n, pool.handle_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        ended_before = -1
        while pool.has_workers():
            on_update(store)
            # Counted before dead workers are replaced: a result that a worker recorded just before
            # it failed is progress, and starts the count of failures again.
            ended = sum(result.state in ENDED_STATES for result in store.summarize_trials())
            pool.replace_dead_workers(has_progressed=ended != ended_before)
            ended_before = ended
            time.sleep(_POLL_S)
        on_update(store)
    finally:
        # The handlers are restored last: Ctrl-C while workers are being killed must not leave some.
        pool.kill_workers()
        for number, handler in before.items():
            signal.signal(number, handler)
    if pool.interrupts > 1:
        return ExitCode.INTERRUPTED
    if pool.interrupts:
        return ExitCode.PREEMPTED
    return ExitCode.OK


class _WorkerPool:
    """The processes of the workers, one per slot."""

    def __init__(self, sweep: SweepFolder, parallel: int) -> None:
        self._sweep, self._parallel = sweep, parallel
        self._failures, self.interrupts = 0, 0
        self._workers = {slot: self._start_worker(slot) for slot in range(parallel)}

    def _start_worker(self, slot: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        command = ["sweep", "--work", str(self._sweep.folder), "--slot", str(slot)]
        with self._sweep.get_worker_log_file(str(slot)).open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "echelon", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | assign_devices(slot, self._parallel, os.environ),
                start_new_session=True,  # Ctrl-C is for us to pass on
                preexec_fn=lambda: die_with_parent(parent),
            )

    def has_workers(self) -> bool:
        """Return whether any slot has a worker; one that is done is not replaced."""
        return bool(self._workers)

    def replace_dead_workers(self, has_progressed: bool) -> None:
        """Start a new worker for each that failed or was killed, none for those that are done."""
        self._failures = 0 if has_progressed else self._failures
        for slot, worker in list(self._workers.items()):
            code = worker.poll()
            if code is None:
                continue
            del self._workers[slot]
            if code == ExitCode.OK or self.interrupts:
                continue
            self._failures += code > 0  # kills, by a person or for memory, do not count
            if self._failures >= _MAX_FAILURES_IN_A_ROW:
                raise _make_workers_failed_error(self._sweep, slot, code)
            self._workers[slot] = self._start_worker(slot)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the workers to save and end; the second time, kill them."""
        self.interrupts += 1
        if self.interrupts > 1:
            self.kill_workers()
            return
        print("\nthe running trials save and end; Ctrl-C again stops at once", file=sys.stderr)
        for worker in self._workers.values():
            worker.terminate()

    def kill_workers(self) -> None:
        """Kill all workers; the kernel ends their trials with them."""
        for worker in self._workers.values():
            worker.kill()
            worker.wait()
        self._workers = {}


def assign_devices(slot: int, parallel: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a worker has its share of this machine: GPUs, else threads."""
    if devices := _list_devices(env):
        count = max(1, len(devices) // parallel)
        first = slot * count % len(devices)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + count])}
    if parallel == 1 or "OMP_NUM_THREADS" in env:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // parallel))}


def _list_devices(env: Mapping[str, str]) -> list[str]:
    count = count_visible_gpus(env)
    named = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]


def _make_workers_failed_error(sweep: SweepFolder, slot: int, code: int) -> EchelonError:
    log = sweep.get_worker_log_file(str(slot))
    text = log.read_text(errors="replace", encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    return EchelonError(
        Fault(
            f"{_MAX_FAILURES_IN_A_ROW} workers ended in a row, the last with {code}: "
            f"{(lines or ['?'])[-1]}",
            f"see {log}",
        ),
        exit=ExitCode.FAILED,
    )
