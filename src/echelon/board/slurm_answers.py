"""What Slurm last said of jobs. Its controller answers all its users, so it is asked seldom, and
never while somebody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.runs.slurm_queue import SlurmJobState, SlurmQueueAnswer

_ASK_EVERY_S = 10.0
_FORGET_S = 60.0


class SlurmAnswers:
    """Answers of Slurm that are kept, and asked for again in the background."""

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self._wanted: dict[str, float] = {}
        """When each job was last asked for here."""
        self._states: dict[str, SlurmJobState] = {}
        self._answered: set[str] = set()
        self._error = ""
        self._next_query = 0.0
        self._is_asking = False

    def ask(self, jobs: Sequence[str]) -> SlurmQueueAnswer:
        """Return at once what is known of jobs; of those that Slurm was never asked about, that it
        does not answer."""
        from echelon.runs.slurm_queue import SlurmQueueAnswer

        if not jobs:
            return SlurmQueueAnswer({})
        with self._lock:
            now = time.monotonic()
            self._wanted.update(dict.fromkeys(jobs, now))
            if not self._is_asking and now >= self._next_query:
                self._is_asking = True
                threading.Thread(target=self._query, name="board-slurm", daemon=True).start()
            if not self._answered.issuperset(jobs):
                return SlurmQueueAnswer({}, "it was not asked yet")
            states = {job: self._states[job] for job in jobs if job in self._states}
            return SlurmQueueAnswer(states, self._error)

    def _query(self) -> None:
        from echelon.runs.slurm_queue import query_jobs

        with self._lock:
            oldest = time.monotonic() - _FORGET_S
            self._wanted = {job: t for job, t in self._wanted.items() if t >= oldest}
            jobs = list(self._wanted)
        answer = query_jobs(jobs)
        with self._lock:
            self._is_asking = False
            self._next_query = time.monotonic() + _ASK_EVERY_S
            self._error = answer.error
            self._answered = set(jobs)
            self._states = answer.states
        self._on_answer()
