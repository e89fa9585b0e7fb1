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

from echelon.launch.process_record import identify_this_process, is_alive
from echelon.launch.slurm.queue import read_job_id
from echelon.utils.files import write_json_atomically


@dataclass(frozen=True)
class TrialLease:
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

    def with_next_beat(self) -> TrialLease:
        return replace(self, beat=self.beat + 1)


def make_worker_name(slot: str, env: Mapping[str, str]) -> str:
    process = identify_this_process()
    return read_job_id(env) or f"{process['host']}:{process['pid']}:{slot}"


def create_lease(worker: str, previous_lease: TrialLease | None, step: int) -> TrialLease:
    takes = (
        previous_lease.takes + 1
        if previous_lease is not None and previous_lease.step == step
        else 1
    )
    return TrialLease(
        worker, secrets.token_hex(8), identify_this_process(), _read_pid_namespace(), takes, step
    )


def _read_pid_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def read_lease(path: Path) -> TrialLease | None:
    """Under the lock; what cannot be read was never whole, and nobody has the trial."""
    try:
        return TrialLease(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_lease(path: Path, lease: TrialLease) -> None:
    write_json_atomically(path, asdict(lease))


def is_abandoned(lease: TrialLease | None) -> bool:
    """Whether nobody has the trial, as far as can be told at once."""
    if lease is None or lease.free:
        return True
    return lease.space == _read_pid_namespace() and is_alive(lease.process) is False


@dataclass
class LeaseWatch:
    """What one worker has seen of the others' beats."""

    lease_s: float
    _last_beats: dict[str, tuple[int, float]] = field(default_factory=dict)

    def is_free_to_take(self, lease: TrialLease | None, worker: str) -> bool:
        if lease is None or lease.worker == worker or is_abandoned(lease):
            return True
        now = time.monotonic()
        beat, since = self._last_beats.get(lease.token, (-1, now))
        if beat != lease.beat:
            self._last_beats[lease.token] = (lease.beat, now)
            return False
        return now - since > self.lease_s
