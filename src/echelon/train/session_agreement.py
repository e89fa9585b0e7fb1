"""What the ranks of a session agree on in every iteration of a user's loop.

What a rank asks for travels with the gradients of the first backward pass; only an iteration
without one needs a message of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.parallel.process_group import RankGroup
from echelon.train.loop_exit import LoopExit
from echelon.train.stop_signals import StopSignals

CONTROL_SIZE = 4
_STOP, _SAVE, _FINISH, _CLOCK = range(CONTROL_SIZE)
_NO_REQUESTS = [0.0] * CONTROL_SIZE
_MAX_CLOCK_S = 10_000.0
"""More would not fit into float16, in which the gradients may be. The rest follows."""


class AgreedRequests(NamedTuple):
    """What any rank has asked for."""

    is_stopped: bool
    is_save_due: bool
    is_finished: bool


class SessionAgreement:
    """Collects what this rank asks for, and tells what any rank has asked for before the first
    backward pass of an iteration was over. What is asked for later in the iteration waits for the
    next one, at any world size.
    """

    def __init__(
        self,
        group: RankGroup,
        stop: StopSignals,
        save_minutes: float | None,
        loop_exit: LoopExit,
    ) -> None:
        self._group, self._stop = group, stop
        self._loop_exit = loop_exit
        self._save_minutes = save_minutes
        self._next_save_s = time.monotonic() + 60 * (save_minutes or 0)
        self._requests = [False, False, False]
        self._control: list[float] | None = None
        """What was asked for before the end of this iteration's first backward pass."""
        self._is_agreed = False
        """Whether that is what any rank has asked for."""
        self.has_step = False
        """Whether this iteration has made the step of an optimizer."""
        self._begun_s = time.monotonic()
        self.clock_s, self._clock_before_s = 0.0, 0.0
        """Rank 0's clock at the ends of the last two iterations, as all ranks know it."""

    def start_clock(self) -> None:
        """Begin to count time: the loop begins."""
        self._begun_s = time.monotonic()

    def request_finish(self) -> None:
        """Ask all ranks to end the loop."""
        self._requests[_FINISH] = True

    def note_requests(self) -> None:
        """Note what this process has asked for so far in the iteration."""
        if self._control is None:
            self._control = self._collect_control()

    def agree_in_backward(self, reduce: Callable[[Sequence[float]], list[float]]) -> None:
        """Sum the gradients of a backward pass with `reduce`, and the ranks' requests with them."""
        self._loop_exit.begin_message()
        if self._is_agreed:  # a second pass in the iteration
            reduce(_NO_REQUESTS)
        else:
            self._control, self._is_agreed = reduce(self._collect_control()), True

    def agree(self) -> AgreedRequests:
        """End an iteration: return what any rank has asked for in time."""
        self.note_requests()  # where the iteration had no backward pass
        assert self._control is not None
        if self._group.world.size > 1 and not self._is_agreed:
            control = torch.tensor(self._control)
            self._loop_exit.meet_without_step()
            dist.all_reduce(control)
            self._control = control.tolist()
        agreed, self._control = self._control, None
        self._is_agreed = self.has_step = False
        self._clock_before_s = self.clock_s
        self.clock_s += agreed[_CLOCK]
        if self._group.world.size == 1:
            agreed[_STOP] = self._stop.is_requested
        if agreed[_SAVE]:
            self._requests[_SAVE] = False
            self._next_save_s = time.monotonic() + 60 * (self._save_minutes or 0)
        return AgreedRequests(bool(agreed[_STOP]), bool(agreed[_SAVE]), bool(agreed[_FINISH]))

    def has_time_passed(self, minutes: float) -> bool:
        """Return whether a multiple of so many minutes has passed in the iteration before."""
        period_s = 60 * minutes
        return self.clock_s // period_s > self._clock_before_s // period_s

    def _collect_control(self) -> list[float]:
        """Return what this rank asks for: with a signal, which may reach any rank, and the timer
        and the clock of rank 0."""
        self._requests[_STOP] |= self._stop.is_requested
        passed_s = 0.0
        if self._group.world.rank == 0:
            now_s = time.monotonic()
            if self._save_minutes is not None:
                self._requests[_SAVE] |= now_s >= self._next_save_s
            # Since what all ranks have: so nothing adds up that was lost to a short dtype.
            passed_s = min(_MAX_CLOCK_S, now_s - self._begun_s - self.clock_s)
        return [*map(float, self._requests), passed_s]
