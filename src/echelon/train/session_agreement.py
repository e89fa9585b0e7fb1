"""What the ranks of a session agree on in every iteration of a user's loop.

What a rank asks for travels with the gradients of the iteration; only an iteration without a step
of an optimizer needs a message of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.parallel.process_group import RankGroup
from echelon.train.loop_exit import LoopExit
from echelon.train.stop_signals import StopSignals

CONTROL_SIZE = 4
_STOP, _SAVE, _FINISH, _CLOCK = range(CONTROL_SIZE)
_MAX_CLOCK_S = 10_000.0
"""More would not fit into float16, in which the gradients may be. The rest follows."""


class AgreedRequests(NamedTuple):
    """What any rank has asked for."""

    is_stopped: bool
    is_save_due: bool
    is_finished: bool


class SessionAgreement:
    """Collects what this rank asks for, and tells what any rank has asked for before the step of an
    iteration. What is asked for later in the iteration waits for the next one, at any world size.
    """

    def __init__(
        self,
        group: RankGroup,
        device: torch.device,
        stop: StopSignals,
        save_minutes: float | None,
        loop_exit: LoopExit,
    ) -> None:
        self._group, self._device, self._stop = group, device, stop
        self._loop_exit = loop_exit
        self._save_minutes = save_minutes
        self._next_save_s = time.monotonic() + 60 * (save_minutes or 0)
        self._requests = [False, False, False]
        self._control: list[float] | None = None
        """What was asked for before the step of this iteration."""
        self._is_agreed = False
        """Whether that is what any rank has asked for."""
        self._begun_s = time.monotonic()
        self._clock_s, self._clock_before_s = 0.0, 0.0
        """Rank 0's clock at the ends of the last two iterations, as all ranks know it."""

    @property
    def has_step(self) -> bool:
        """Whether this iteration has made the step of an optimizer."""
        return self._control is not None

    def start_clock(self) -> None:
        """Begin to count time: the loop begins."""
        self._begun_s = time.monotonic()

    def request_finish(self) -> None:
        """Ask all ranks to end the loop."""
        self._requests[_FINISH] = True

    def note_step(self) -> None:
        """Note what this process, which is alone, has asked for before a step."""
        if self._control is None:
            self._control = self._collect_control()

    def agree_in_step(self, reduce: Callable[[Tensor | None], Tensor]) -> None:
        """Sum the gradients of an optimizer with `reduce`, and the ranks' requests with them."""
        self._loop_exit.begin_message()
        if self._control is not None:  # a second step in the iteration
            reduce(None)
            return
        control = torch.tensor(self._collect_control())
        if self._device.type == "cpu":
            control = reduce(control)
        else:
            # Read from a GPU it would make the GPU wait, so it crosses beside the gradients.
            work = dist.all_reduce(control, async_op=True)
            reduce(None)
            if work is not None:
                work.wait()
        self._control, self._is_agreed = control.tolist(), True

    def agree(self) -> AgreedRequests:
        """End an iteration: return what any rank has asked for before its step."""
        self.note_step()  # where the iteration had none
        assert self._control is not None
        if self._group.world.size > 1 and not self._is_agreed:
            control = torch.tensor(self._control)
            self._loop_exit.meet_without_step()
            dist.all_reduce(control)
            self._control = control.tolist()
        agreed, self._control, self._is_agreed = self._control, None, False
        self._clock_before_s = self._clock_s
        self._clock_s += agreed[_CLOCK]
        if self._group.world.size == 1:
            agreed[_STOP] = self._stop.is_requested
        if agreed[_SAVE]:
            self._requests[_SAVE] = False
            self._next_save_s = time.monotonic() + 60 * (self._save_minutes or 0)
        return AgreedRequests(bool(agreed[_STOP]), bool(agreed[_SAVE]), bool(agreed[_FINISH]))

    def has_time_passed(self, minutes: float) -> bool:
        """Return whether a multiple of so many minutes has passed in the iteration before."""
        period_s = 60 * minutes
        return self._clock_s // period_s > self._clock_before_s // period_s

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
            passed_s = min(_MAX_CLOCK_S, now_s - self._begun_s - self._clock_s)
        return [*map(float, self._requests), passed_s]
