"""Waiting for keys in the store through which the ranks of a world meet.

The store is torch's key-value store. The agent hosts it where there is one; otherwise rank 0 does.
A rank that fails publishes its failure there, so every wait ends when a failure is published.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.failure import Failure
from echelon.world.sealed_store import SealedStore

_CONNECT_TIMEOUT_S = 10.0
SILENT_WAIT_S = 2.0
"""A wait that takes longer is reported."""


class PeerFailedError(Exception):
    """Another rank failed first. This rank reports that failure as its own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


class StoreLostError(EchelonError):
    """The process that hosts the store has gone."""


def connect_to_store(address: str, timeout_s: float) -> dist.Store:
    """Return a client of the store at HOST:PORT, which is there already."""
    host, _, port = address.rpartition(":")
    # torch's client would try again for minutes.
    socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    return dist.TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), False)


def print_wait_message(text: str, timeout_s: float) -> bool:
    """Prints what this rank waits for. Returns True, to be kept as "has been reported"."""
    print(f"{text}, at most {timeout_s:g} s", file=sys.stderr, flush=True)
    return True


def wait_for_keys(store: SealedStore, keys: list[str], timeout_s: float) -> list[int]:
    """Return the positions of keys that are not set when the time is up. A failure ends the
    wait."""
    started, has_reported = time.monotonic(), False
    patience = _make_backoff()
    while True:
        waited = time.monotonic() - started
        try:
            all_here, failure = store.check(keys), read_failure(store)
            if not all_here and waited > timeout_s:
                return [i for i, key in enumerate(keys) if not store.check([key])]
        except Exception as error:
            raise StoreLostError(
                Fault(
                    f"the process that hosts this world's meeting point went away: {error}",
                    "look at the end of rank 0's output, and start again",
                ),
                exit=ExitCode.RENDEZVOUS,
            ) from None
        # Checked before the failure: the store's host must not leave, and take the store with it,
        # before all ranks have joined.
        if all_here:
            return []
        if failure:
            raise PeerFailedError(failure)
        if waited > SILENT_WAIT_S and not has_reported:
            missing_keys = [key for key in keys if not store.check([key])]
            has_reported = print_wait_message(
                f"waiting for {', '.join(missing_keys[:8])}", round(timeout_s)
            )
        time.sleep(patience())


def _make_backoff() -> Callable[[], float]:
    """Return a function that gives the next pause: 1 ms at first, for worlds that start together,
    up to 50 ms, so that long waits cost little."""
    pause = 0.001

    def next_pause() -> float:
        nonlocal pause
        pause = min(0.05, pause * 1.3)
        return pause

    return next_pause


def read_failure(store: SealedStore) -> Failure | None:
    """Return the failure that a rank published, or None."""
    return Failure.from_json(store.get("failure")) if store.check(["failure"]) else None


def format_ranks(ranks: list[int]) -> str:
    """Formats a list of ranks, at most 16 of them."""
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
