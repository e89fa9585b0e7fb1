"""Leases: which worker has a trial, and whether that worker is still alive.

On the same host the kernel knows. Of a worker on another host only the heartbeats in its lease are
seen. They are counted, and timed by the clock of the observer: clocks of two machines are never
compared.
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

from echelon.runs.process_record import identify_this_process, is_alive
from echelon.runs.slurm_queue import read_current_job_id
from echelon.utils.files import write_json_atomically


@dataclass(frozen=True)
class TrialLease:
    """The lease of one trial. Serialised by these names; changed only under the sweep's lock."""

    worker: str
    """The name of the worker. It is the same after a requeue, so that a worker takes its own trial
    again at once."""
    token: str
    """A random id of this lease. A worker that finds another one in the file has lost the trial."""
    process: dict[str, Any]
    pid_namespace: int
    """The PID namespace of the process: its id means nothing in another container."""
    takes: int = 1
    """How often the trial was taken without reaching another snapshot."""
    step: int = 0
    """The step of its newest snapshot when it was taken."""
    heartbeat: int = 0
    """Counts up while the worker lives."""
    is_released: bool = False
    """The worker gave the trial back."""

    def with_next_heartbeat(self) -> TrialLease:
        """Return the lease of a worker that is still alive."""
        return replace(self, heartbeat=self.heartbeat + 1)


def make_worker_name(slot: str, env: Mapping[str, str]) -> str:
    """Return the id of the Slurm job, which outlives a requeue, or a name of this process."""
    process = identify_this_process()
    return read_current_job_id(env) or f"{process['host']}:{process['pid']}:{slot}"


def build_lease(worker: str, previous_lease: TrialLease | None, step: int) -> TrialLease:
    """Return a new lease for this process, given the last one and the step of the snapshot."""
    has_progressed = previous_lease is None or previous_lease.step != step
    takes = 1 if previous_lease is None or has_progressed else previous_lease.takes + 1
    token = secrets.token_hex(8)
    return TrialLease(worker, token, identify_this_process(), _read_pid_namespace(), takes, step)


def _read_pid_namespace() -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def read_lease(path: Path) -> TrialLease | None:
    """Read a lease. The caller holds the lock of the sweep, or only displays the result.

    Returns None if there is no lease, or if it cannot be read: it was then never written whole.
    """
    try:
        return TrialLease(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_lease(path: Path, lease: TrialLease) -> None:
    """Write a lease. The caller holds the lock of the sweep."""
    write_json_atomically(path, asdict(lease))


def is_released_or_dead(lease: TrialLease | None) -> bool:
    """Return whether nobody has the trial, as far as this host knows without waiting for
    heartbeats."""
    if lease is None or lease.is_released:
        return True
    return lease.pid_namespace == _read_pid_namespace() and is_alive(lease.process) is False


@dataclass
class LeaseWatch:
    """What one worker has seen of the heartbeats of others."""

    lease_s: float
    _last_heartbeats: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By token: the last count, and when it was first seen."""

    def is_free_to_take(self, lease: TrialLease | None, worker: str) -> bool:
        """Return whether `worker` may take the trial of this lease.

        To be asked again and again: the silence of a worker is measured from the first call.
        """
        if lease is None or lease.worker == worker or is_released_or_dead(lease):
            return True
        now = time.monotonic()
        heartbeat, since = self._last_heartbeats.get(lease.token, (-1, now))
        if heartbeat != lease.heartbeat:
            self._last_heartbeats[lease.token] = (lease.heartbeat, now)
            return False
        return now - since > self.lease_s
