"""How often what was told of the steps is read back.

Reading makes the host wait for a GPU, so quick steps are read many at a time. Slow ones are read
one by one: a stop that a rank wishes is heard by the others only then, and sixteen steps of ten
seconds are longer than a scheduler waits. Ranks must read together, so they tell each other which
it is, with their wishes.
"""

from __future__ import annotations

import time

from echelon.train.replica import Wishes

_SLOW_S = 0.05
_FIRST = 4
"""Steps that are read one by one: which it is shows in them. The very first says nothing."""


class Looks:
    def __init__(self) -> None:
        self.slow = False
        """Whether this rank wishes to read after every step."""
        self._each = False
        self._first: int | None = None
        self._last = (0.0, 0)

    def due(self, step: int, every: int) -> bool:
        if self._first is None:
            self._first = step
        return self._each or step % every == 0 or step < self._first + _FIRST

    def looked(self, step: int, agreed: Wishes) -> None:
        now, (then, before) = time.monotonic(), self._last
        if before:
            self.slow = now - then > _SLOW_S * (step - before)
        self._last, self._each = (now, step), agreed.look
