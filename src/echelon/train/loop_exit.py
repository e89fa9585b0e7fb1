"""Ranks that leave a user's loop at different steps, or of which one skips the step of an
optimizer, are named, instead of waiting for each other.

A rank that leaves says so in the store, with the number of messages that it has exchanged with all
ranks, and waits until all have left. A rank that has begun a further one waits for the one that
left, in vain: a thread of its own, which looks into the store once a second, finds that out.

A rank that ends an iteration without a step waits in the store too, until all others do: where they
are in a step, messages of different lengths would meet, which ends a process without a word.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.parallel.process_group import RankGroup
from echelon.parallel.store import PeerFailedError, read_failure
from echelon.runs.failure import make_failure_from_exception

_LOOK_S = 1.0
_POLL_S = 0.01
_MEET_POLL_S = 0.0002
_FIRST_KEY = "left the loop"
_NO_STEP_KEY = "ended without a step"
_CALLS_KEY = "calls of rank 0"
_KEPT_CALLS = 8
_END = "for the next batch"


class LoopExit:
    """Where one rank is in the loop, and whether it has left it. Alone it does nothing."""

    def __init__(self, group: RankGroup, step: int) -> None:
        self._group, self._store = group, group.store
        self._step = step
        self._message_count = 0
        self._is_without_step = False
        """Whether the current message is that of an iteration without a step."""
        self._last_meeting = f"{_NO_STEP_KEY}/0"
        self._has_left = False
        self._calls: deque[tuple[int, str, int]] = deque(maxlen=_KEPT_CALLS)
        """The last ones by the number of their message, and the steps that they were in."""
        self._looked_at = 0
        """The number of the message at the last look."""

    def start_watching(self) -> None:
        """Begin to look for ranks that have left: the loop begins."""
        if self._store is not None:
            threading.Thread(target=self._watch, daemon=True, name="loop exit").start()

    def stop_watching(self) -> None:
        """Look for nobody any more: the round has ended."""
        self._has_left = True

    def begin_message(self, call: str) -> None:
        """Note that this rank is about to exchange something with all others, in this call."""
        self._is_without_step = False
        self._note_call(call)

    def meet_without_step(self) -> None:
        """Note that this rank ends an iteration without a step of an optimizer, and wait until all
        do; raises on all ranks if one is in a step."""
        self._is_without_step = True
        self._note_call(_END)
        if self._store is None:
            return
        rank, size = self._group.world.rank, self._group.world.size
        key = f"{_NO_STEP_KEY}/{self._message_count}"
        if self._store.add(key, 1) == 1:
            self._store.set(f"{key}/first", json.dumps({"rank": rank, "step": self._step + 1}))
        deadline = time.monotonic() + self._group.timeout_s
        while self._store.add(key, 0) < size:
            if failure := read_failure(self._store):
                raise PeerFailedError(failure)
            if time.monotonic() > deadline:
                raise _make_skip_error(f"rank {rank} ended step {self._step + 1}, others did not")
            time.sleep(_MEET_POLL_S)
        if rank == 0:  # all have read the keys of the meeting before: a long loop leaves none
            for old in (self._last_meeting, f"{self._last_meeting}/first"):
                self._store.delete_key(old)
        self._last_meeting = key

    def go_on(self, step: int) -> None:
        """Note that this rank stays in the loop after a step."""
        self._note_call(_END)
        self._step = step

    def _note_call(self, call: str) -> None:
        self._message_count += 1
        self._calls.append((self._message_count, call, self._step + 1))

    def leave(self, step: int) -> None:
        """Say that this rank leaves the loop after a step, and wait until all have left it; raises
        on all ranks if one goes on."""
        if self._store is None or self._has_left:
            return
        self._has_left = True
        rank, size = self._group.world.rank, self._group.world.size
        left = json.dumps({"rank": rank, "step": step, "messages": self._message_count})
        self._store.compare_set(_FIRST_KEY, "", left)
        self._store.set(f"{_FIRST_KEY}/{rank}", left)
        keys = [f"{_FIRST_KEY}/{other}" for other in range(size)]
        deadline = time.monotonic() + self._group.timeout_s
        while not self._store.check(keys):
            if failure := read_failure(self._store):
                raise PeerFailedError(failure)
            if time.monotonic() > deadline:
                raise _make_error(
                    f"rank {rank} left the loop after step {step}, and others did not"
                )
            time.sleep(_POLL_S)

    def _watch(self) -> None:
        """Body of the thread: publish the failure of a world of which a rank has left, or has ended
        an iteration without the call that this rank waits in."""
        assert self._store is not None
        with contextlib.suppress(Exception):  # the store ends with its host
            while not self._has_left and not self._store.check([_FIRST_KEY]):
                self._look_for_skipped_call()
                self._look_for_other_call()
                time.sleep(_LOOK_S)
            if self._has_left:
                return
            left: dict[str, Any] = json.loads(self._store.get(_FIRST_KEY))
            while not self._has_left and self._message_count <= left["messages"]:
                time.sleep(_POLL_S)
            if not self._has_left:
                own = f"rank {self._group.world.rank} went on after step {self._step}"
                what = f"rank {left['rank']} left the loop after step {left['step']}, but {own}"
                failure = make_failure_from_exception(_make_error(what), left["rank"], left["step"])
                self._store.compare_set("failure", "", failure.to_json())

    def _look_for_skipped_call(self) -> None:
        """Publish a failure where this rank is in a message, and another one has ended the
        iteration in its place."""
        assert self._store is not None
        number, is_without_step = self._message_count, self._is_without_step
        key = f"{_NO_STEP_KEY}/{number}/first"
        if is_without_step or not self._store.check([key]) or number != self._message_count:
            return
        skipped: dict[str, Any] = json.loads(self._store.get(key))
        what = (
            f"rank {skipped['rank']} ended step {skipped['step']} without a call that rank "
            f"{self._group.world.rank} waits in: session.step, or another one of all ranks"
        )
        error = _make_skip_error(what)
        failure = make_failure_from_exception(error, skipped["rank"], skipped["step"] - 1)
        self._store.compare_set("failure", "", failure.to_json())

    def _look_for_other_call(self) -> None:
        """Publish a failure where this rank has called something that rank 0 has not. Only a rank
        that has not gone on since the last look asks: it may wait in vain."""
        assert self._store is not None
        is_going_on, self._looked_at = self._looked_at != self._message_count, self._message_count
        if is_going_on:
            return
        own, rank = list(self._calls), self._group.world.rank
        if rank == 0:
            self._store.set(_CALLS_KEY, json.dumps(own))
            return
        if not self._store.check([_CALLS_KEY]):
            return
        of_rank0 = {number: call for number, call, _ in json.loads(self._store.get(_CALLS_KEY))}
        for number, call, step in own:
            if (other := of_rank0.get(number, call)) != call:
                what = f"in step {step} rank {rank} called {call}, but rank 0 called {other}"
                failure = make_failure_from_exception(_make_skip_error(what), rank, step - 1)
                self._store.compare_set("failure", "", failure.to_json())
                self._group.interrupt_collectives()
                return


def _make_skip_error(what: str) -> EchelonError:
    return EchelonError(
        Fault(
            what,
            "call it on every rank in every iteration; to leave out a batch, decide by what all "
            "ranks know, such as session.gather(loss.detach().reshape(1)).isfinite().all()",
        ),
        exit=ExitCode.FAILED,
    )


def _make_error(what: str) -> EchelonError:
    return EchelonError(
        Fault(
            what,
            "decide by what all ranks know, such as a number that was gathered, or call "
            "session.stop(), which ends the loop on all of them",
        ),
        exit=ExitCode.FAILED,
    )
