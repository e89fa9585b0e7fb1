"""Who has a trial, and whether they are still there.

On one host the kernel knows. Of another host's worker only the beats are seen, timed by the clock
of who looks: nobody compares the clocks of two machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.launch.process import is_alive, this_process
from echelon.launch.slurm.queue import this_job
from echelon.utils.files import write_json_atomically


@dataclass(frozen=True)
class Lease:
    worker: str
    """Stays the same over requeues: what a worker had before, it takes up again at once."""
    token: str
    process: dict[str, Any]
    space: int
    """Of process numbers; those of another container mean nothing here."""
    takes: int = 1
    """How often the trial was taken since it came to another step."""
    step: int = 0
    """Of its newest snapshot then."""
    beat: int = 0
    free: bool = False
    """Given back on purpose."""

    def beaten(self) -> Lease:
        return replace(self, beat=self.beat + 1)


def worker_name(slot: str, env: Mapping[str, str]) -> str:
    process = this_process()
    return this_job(env) or f"{process['host']}:{process['pid']}:{slot}"


def new(worker: str, before: Lease | None, step: int) -> Lease:
    takes = before.takes + 1 if before is not None and before.step == step else 1
    return Lease(worker, secrets.token_hex(8), this_process(), _space(), takes, step)


def _space() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def read(path: Path) -> Lease | None:
    """Under the lock; what cannot be read was never whole, and nobody has the trial."""
    try:
        return Lease(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write(path: Path, lease: Lease) -> None:
    write_json_atomically(path, asdict(lease))


def is_left(lease: Lease | None) -> bool:
    """Whether nobody has the trial, as far as can be told at once."""
    if lease is None or lease.free:
        return True
    return lease.space == _space() and is_alive(lease.process) is False


@dataclass
class Watch:
    """What one worker has seen of the others' beats."""

    lease_s: float
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def is_over(self, lease: Lease | None, worker: str) -> bool:
        if lease is None or lease.worker == worker or is_left(lease):
            return True
        now = time.monotonic()
        beat, since = self._seen.get(lease.token, (-1, now))
        if beat != lease.beat:
            self._seen[lease.token] = (lease.beat, now)
            return False
        return now - since > self.lease_s
