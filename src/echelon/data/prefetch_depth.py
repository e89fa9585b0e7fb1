"""How far loader processes work ahead of the training: further while it waits for them, less where
memory is short.

torch's DataLoader has a fixed number, two batches a process. That is enough where all batches take
the same time. Where some samples take long, the training waits although the processes are quick
enough on the whole: a longer queue evens that out.
"""

from __future__ import annotations

import os
import time
from collections import deque

import psutil

MAX_DEPTH = 16
"""Batches ahead for each process, at most."""
FIRST_DEPTH = 2
"""torch's own default."""
_LATE_BATCHES, _OBSERVED_BATCHES = 4, 16
"""So many of the last batches must have been waited for before more is fetched ahead."""
_LATE_SHARE, _LATE_S = 0.05, 0.5e-3
"""A batch is late if the training waited for more than this of its time from batch to batch."""
_MAX_BYTES = 1 << 30
"""For the batches ahead of one rank."""
_CHECK_EVERY_S = 1.0
_SHARED_MEMORY = "/dev/shm"


class PrefetchDepth:
    """Decides how many batches ahead each loader process of one source works."""

    def __init__(self, workers: int, fixed_depth: int | None = None) -> None:
        """`fixed_depth` is that of the user; it stays as it is."""
        self.depth = fixed_depth or FIRST_DEPTH
        self.is_fixed = fixed_depth is not None
        self._workers = workers
        self._late: deque[bool] = deque(maxlen=_OBSERVED_BATCHES)
        self._last_at = time.perf_counter()
        self._check_at = self._last_at

    @property
    def max_batches(self) -> int:
        """The batches ahead of all processes together."""
        return self.depth * self._workers

    def note_batch(self, waited_s: float, size_bytes: int) -> None:
        """Note that the training has got a batch, for which it has waited so long."""
        if self.is_fixed:
            return
        now = time.perf_counter()
        elapsed_s, self._last_at = now - self._last_at, now
        self._late.append(waited_s > max(_LATE_S, _LATE_SHARE * elapsed_s))
        is_late = sum(self._late) >= _LATE_BATCHES
        if not is_late and now < self._check_at:
            return
        self._check_at = now + _CHECK_EVERY_S
        affordable = _measure_budget_bytes() // max(1, size_bytes) // self._workers
        wanted = self.depth + 1 if is_late else self.depth
        if is_late:
            self._late.clear()
        self.depth = max(1, min(wanted, affordable, MAX_DEPTH))


def _measure_budget_bytes() -> int:
    """Return the memory that batches ahead may take: a small part of what is free. What they take
    already is not free any more, so this falls as they grow."""
    budget = min(_MAX_BYTES, psutil.virtual_memory().available // 8)
    try:
        shared = os.statvfs(_SHARED_MEMORY)
    except OSError:  # macOS has none
        return budget
    return min(budget, shared.f_bavail * shared.f_frsize // 2)
