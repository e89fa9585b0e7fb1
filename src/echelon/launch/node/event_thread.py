"""The thread that waits for connections and timers, for all lifelines of a process."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Callable


class EventThread:
    """A thread that calls others when something can be read or a time has come. What it calls must
    not wait."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="lifeline").start()

    @property
    def is_ours(self) -> bool:
        """Whether it runs in this process: a forked one has no threads of its parent."""
        return self._pid == os.getpid()

    def watch(self, fileno: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` whenever there is something to read."""
        self._loop.call_soon_threadsafe(self._loop.add_reader, fileno, on_readable)

    def unwatch(self, fileno: int, then: Callable[[], None]) -> None:
        """Stop watching, and call `then` once nothing is called any more."""

        def stop() -> None:
            self._loop.remove_reader(fileno)
            then()

        self._loop.call_soon_threadsafe(stop)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)

    def call_every(self, interval_s: float, callback: Callable[[], bool]) -> None:
        """Call it now and again and again, as long as it returns True, or fails: a node whose timer
        had ended would seem lost to others, and would lose nobody."""

        def call() -> None:
            goes_on = True
            try:
                goes_on = callback()
            except Exception:
                traceback.print_exc()
            if goes_on:
                self._loop.call_later(interval_s, call)

        self._loop.call_soon_threadsafe(call)


_lock = threading.Lock()
_made: list[EventThread] = []


def get_event_thread() -> EventThread:
    """Return the thread of this process, which is started by the first call."""
    with _lock:
        if not _made or not _made[-1].is_ours:
            _made[:] = [EventThread()]
        return _made[0]
