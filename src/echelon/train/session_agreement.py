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
from echelon.parallel.replica import StepRequests
from echelon.train.loop_exit import LoopExit
from echelon.train.minute_timers import MinuteTimers
from echelon.train.stop_signals import StopSignals

CONTROL_SIZE = 7
_STOP, _SAVE, _EVALUATE, _FINISH, _REGROUP, _COPY, _CLOCK = range(CONTROL_SIZE)
_NO_REQUESTS = [0.0] * CONTROL_SIZE
_MAX_CLOCK_S = 10_000.0
"""More would not fit into float16, in which the gradients may be. The rest follows."""


class AgreedRequests(NamedTuple):
    """What any rank has asked for."""

    requests: StepRequests
    is_finished: bool
    """Whether the loop is to end."""


_NOTHING_AGREED = AgreedRequests(StepRequests(), is_finished=False)


class SessionAgreement:
    """Collects what this rank asks for, and tells what any rank has asked for before the first
    backward pass of an iteration was over. What is asked for later in the iteration waits for the
    next one, at any world size.
    """

    def __init__(
        self,
        group: RankGroup,
        stop: StopSignals,
        timers: MinuteTimers,
        loop_exit: LoopExit,
    ) -> None:
        self._group, self._stop, self._timers = group, stop, timers
        self._loop_exit = loop_exit
        self.is_round_planned: Callable[[], bool] = lambda: False
        """Whether the agents ask the ranks to go over to another round."""
        self.is_copy_due: Callable[[], bool] = lambda: False
        """Whether it is time to copy the state into memory; rank 0's answer counts."""
        self._wants_finish = False
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
        self._wants_finish = True

    def note_requests(self) -> None:
        """Note what this process has asked for so far in the iteration."""
        if self._control is None:
            self._control = self._collect_control()

    def agree_in_backward(self, reduce: Callable[[Sequence[float]], list[float]]) -> None:
        """Sum the gradients of a backward pass with `reduce`, and the ranks' requests with them."""
        self._loop_exit.begin_message("session.backward")
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
        if not any(agreed[:_CLOCK]):  # as in nearly every iteration
            return _NOTHING_AGREED
        stop, save, evaluate = map(bool, agreed[:_FINISH])
        regroup, copy = bool(agreed[_REGROUP]), bool(agreed[_COPY])
        requests = StepRequests(stop, save, evaluate, regroup=regroup, copy=copy)
        return AgreedRequests(requests, bool(agreed[_FINISH]))

    def has_time_passed(self, minutes: float) -> bool:
        """Return whether a multiple of so many minutes has passed in the iteration before."""
        period_s = 60 * minutes
        return self.clock_s // period_s > self._clock_before_s // period_s

    def _collect_control(self) -> list[float]:
        """Return what this rank asks for: with a signal, which may reach any rank, and the timers
        and the clock of rank 0."""
        passed_s, copies = 0.0, False
        if self._group.world.rank == 0:
            copies = self.is_copy_due()
            # Since what all ranks have: so nothing adds up that was lost to a short dtype.
            passed_s = min(_MAX_CLOCK_S, time.monotonic() - self._begun_s - self.clock_s)
        flags = (self._stop.is_requested, *self._timers.take_due(), self._wants_finish)
        return [*map(float, flags), float(self.is_round_planned()), float(copies), passed_s]
