"""How often what was told of the steps is read back.

Reading makes the host wait for a GPU, so quick steps are read many at a time. Slow ones are read
one by one: a stop that a rank wishes is heard by the others only then, and sixteen steps of ten
seconds are longer than a scheduler waits. Ranks must read together, so they tell each other which
it is, with their wishes.
"""

from __future__ import annotations

import time

from echelon.parallel.replica import StepRequests

_SLOW_STEP_S = 0.05
_FIRST_STEPS = 4
"""Steps that are read one by one: which it is shows in them. The very first says nothing."""


class ReadbackSchedule:
    """Decides after which steps the results on the device are read, the same on all ranks."""

    def __init__(self) -> None:
        self.wants_every_step = False
        """Whether this rank wishes to read after every step."""
        self._reads_every_step = False
        self._first: int | None = None
        self._last = (0.0, 0)

    def is_due(self, step: int, every: int) -> bool:
        """Return whether the results are read after this step; ``every`` applies to quick steps."""
        if self._first is None:
            self._first = step
        return self._reads_every_step or step % every == 0 or step < self._first + _FIRST_STEPS

    def record_readback(self, step: int, agreed: StepRequests) -> None:
        """Note that the results were read after this step, and what the ranks agreed on with
        them."""
        now, (then, before) = time.monotonic(), self._last
        if before:
            self.wants_every_step = now - then > _SLOW_STEP_S * (step - before)
        self._last, self._reads_every_step = (now, step), agreed.read_each_step
