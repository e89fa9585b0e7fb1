"""The workers of this machine, side by side, until the sweep is over or somebody stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

from echelon.errors import EchelonError, Exit, Fault
from echelon.gpus import visible_count
from echelon.sweep.book import ENDED, Book
from echelon.sweep.folder import Sweep
from echelon.utils.processes import die_with_parent

_LOOK_S = 0.2
_IN_VAIN = 5
"""So many workers that ended by themselves in a row, without a result between them."""


def supervise(sweep: Sweep, parallel: int, tell: Callable[[Book], None]) -> int:
    book = Book(sweep)
    crew = _Crew(sweep, parallel)
    before = {n: signal.signal(n, crew.hear) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        done = -1
        while crew.at_work():
            tell(book)
            ended = sum(result.state in ENDED for result in book.results())
            crew.look(renew=ended != done)
            done = ended
            time.sleep(_LOOK_S)
        tell(book)
    finally:
        crew.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    if crew.interrupts > 1:
        return Exit.INTERRUPTED
    if crew.interrupts:
        return Exit.PREEMPTED
    return Exit.OK


class _Crew:
    def __init__(self, sweep: Sweep, parallel: int) -> None:
        self._sweep, self._parallel = sweep, parallel
        self._deaths, self.interrupts = 0, 0
        self._workers = {slot: self._start(slot) for slot in range(parallel)}

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        command = ["sweep", "--work", str(self._sweep.folder), "--slot", str(slot)]
        with self._sweep.log(str(slot)).open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "echelon", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | share(slot, self._parallel, os.environ),
                start_new_session=True,  # Ctrl-C is for us to pass on
                preexec_fn=lambda: die_with_parent(parent),
            )

    def at_work(self) -> bool:
        return bool(self._workers)

    def look(self, renew: bool) -> None:
        """Replace who died; who is done is let go."""
        self._deaths = 0 if renew else self._deaths
        for slot, worker in list(self._workers.items()):
            code = worker.poll()
            if code is None:
                continue
            del self._workers[slot]
            if code == Exit.OK or self.interrupts:
                continue
            self._deaths += code > 0  # who is killed, by a person or for memory, may be again
            if self._deaths >= _IN_VAIN:
                raise _no_use(self._sweep, slot, code)
            self._workers[slot] = self._start(slot)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts > 1:
            self.kill()
            return
        print("\nthe trials at work save and end; Ctrl-C again stops at once", file=sys.stderr)
        for worker in self._workers.values():
            worker.terminate()

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()  # what they started ends with them
            worker.wait()
        self._workers = {}


def share(slot: int, parallel: int, env: Mapping[str, str]) -> dict[str, str]:
    """The part of this machine that a worker has: devices, else threads of the CPU."""
    if devices := _devices(env):
        each = max(1, len(devices) // parallel)
        first = slot * each % len(devices)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + each])}
    if parallel == 1 or "OMP_NUM_THREADS" in env:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // parallel))}


def _devices(env: Mapping[str, str]) -> list[str]:
    count = visible_count(env)
    named = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]


def _no_use(sweep: Sweep, slot: int, code: int) -> EchelonError:
    log = sweep.log(str(slot))
    text = log.read_text(errors="replace", encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    return EchelonError(
        Fault(
            f"{_IN_VAIN} workers ended in a row, the last with {code}: {(lines or ['?'])[-1]}",
            f"see {log}",
        ),
        exit=Exit.FAILED,
    )
