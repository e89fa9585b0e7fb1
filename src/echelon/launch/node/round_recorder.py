"""Writes into the history of a run how long its ranks stood still for a round.

Node 0's agent sees the newest step of the world twenty times a second. A round is written when its
first step is made: only then is it known how long there was none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from echelon.runs.history import RoundRecord, record_round
from echelon.runs.run_folder import Run
from echelon.world.rounds import Round

_TIMED_STEPS = 16
"""The usual time of a step is that of so many observed steps before a round."""


class _ObservedStep(NamedTuple):
    step: int
    time_s: float
    """time.monotonic(), as all times here."""


@dataclass
class _PendingRound:
    """A round that has not made a step."""

    round: Round
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    left: tuple[int, ...] = ()
    formed_s: float | None = None
    """When all its ranks were known to take part."""


class RoundRecorder:
    """Follows the steps of one attempt, on node 0."""

    def __init__(self, run: Run, began_s: float) -> None:
        self._run = run
        self._newest_step = 0
        self._observed: deque[_ObservedStep] = deque(maxlen=_TIMED_STEPS + 1)
        self._step_s: float | None = None
        """The usual time of a step before the round that was written last."""
        self._standing_since_s = began_s
        """When the last step was made, or until when the standstill is written down."""
        self._pending: list[_PendingRound] = []
        """The oldest first. A round can be planned before the one before it has made a step."""

    @property
    def unformed(self) -> Round | None:
        """The round of which it is not known yet that all its ranks take part."""
        return next((p.round for p in self._pending if p.formed_s is None), None)

    def observe(self, step: int, is_formed: bool, now_s: float) -> None:
        """Take the newest step of any rank, and whether the unformed round, if there is one, has
        been formed.

        The step must have been read first: no step of a round is made before it is formed.
        """
        unformed = next((p for p in self._pending if p.formed_s is None), None)
        if unformed is not None and is_formed:
            unformed.formed_s = now_s
        has_moved = step > self._newest_step
        if has_moved and self._pending and self._pending[0].formed_s is not None:
            self._step_s = self._measure_step_s()
            self._write(self._pending.pop(0), now_s, self._step_s)
            self._observed.clear()
        # It is less than before where the rank that was ahead is lost.
        self._newest_step = step
        if has_moved:
            self._observed.append(_ObservedStep(step, now_s))
            self._standing_since_s = now_s

    def begin(
        self,
        round_: Round,
        lost: Collection[int],
        joined: Collection[int],
        now_s: float,
        hosts: Collection[str] = (),
        left: Collection[int] = (),
    ) -> None:
        """Note that a round was decided on; `hosts` are those on which something was lost, `left`
        the ranks whose node leaves on purpose.

        After a loss no round before it makes a step any more. One that was formed is written; the
        losses of one that was not are written with this one.
        """
        if not round_.is_planned:
            for before in self._pending:
                if before.formed_s is None:
                    lost, hosts = {*before.lost, *lost}, (*before.hosts, *hosts)
                else:
                    self._write(before, now_s, None)
            self._pending.clear()
        ranks = tuple(sorted(lost)), tuple(sorted(joined))
        self._pending.append(_PendingRound(round_, *ranks, tuple(hosts), tuple(left)))

    def close(self, now_s: float) -> None:
        """Write what is left when the attempt has ended. A planned round that the ranks never came
        to is not."""
        for pending in self._pending:
            if pending.formed_s is not None or pending.lost:
                self._write(pending, pending.formed_s or now_s, None)
        self._pending.clear()

    def _write(self, pending: _PendingRound, until_s: float, step_s: float | None) -> None:
        standstill_s = max(0.0, until_s - self._standing_since_s)
        record = RoundRecord(
            time.time(),
            pending.round.number,
            len(pending.round.slots),
            self._newest_step,
            round(standstill_s, 3),
            None if step_s is None else round(step_s, 6),
            pending.lost,
            pending.joined if pending.formed_s is not None else (),
            pending.round.reason,
            pending.hosts,
            pending.left if pending.formed_s is not None else (),
        )
        record_round(self._run, record)
        self._standing_since_s = until_s

    def _measure_step_s(self) -> float | None:
        """Return the mean time of the last steps; where too few were seen, that of before."""
        if len(self._observed) < 2 or self._observed[-1].step <= self._observed[0].step:
            return self._step_s
        first, last = self._observed[0], self._observed[-1]
        return (last.time_s - first.time_s) / (last.step - first.step)
