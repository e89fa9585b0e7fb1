"""Intervals by minutes: `trainer.save.minutes` and `trainer.evaluate.minutes`."""

from __future__ import annotations

import time

from echelon.config.schema import TrainerConfig


class MinuteTimers:
    """The timers of a training. They are rank 0's alone, because the clocks of ranks differ."""

    def __init__(self, trainer: TrainerConfig, rank: int) -> None:
        self._minutes = (trainer.save.minutes, trainer.evaluate.minutes)
        self._has_none = rank != 0 or self._minutes == (None, None)
        self._starts_s = [time.monotonic()] * 2

    def take_due(self) -> tuple[bool, bool]:
        """Return whether a save and an evaluation are due; such a timer is started again."""
        return (False, False) if self._has_none else (self._take(0), self._take(1))

    def _take(self, number: int) -> bool:
        minutes, now_s = self._minutes[number], time.monotonic()
        if minutes is None or now_s < self._starts_s[number] + 60 * minutes:
            return False
        self._starts_s[number] = now_s
        return True
