"""What pages hear without asking: rows that changed, and runs whose metrics or logs grew.

One thread keeps the index up to date while at least one page is connected; nobody reads anything
otherwise. Each page is answered by a thread of its own, which waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from echelon.board.foreign.foreign_keeper import ForeignKeeper
from echelon.board.request import Request, RequestError, Route, StreamResponse
from echelon.board.run_index import RunIndex
from echelon.board.slurm_answers import SlurmAnswers

_BEAT_S = 15.0
_PAUSE_S = 0.25
"""At most four times a second something is sent."""
_LINGER_S = 10.0
"""A page that is loaded again is back before this."""
_MAX_WATCHED = 200
_MAX_PAGES = 100


@dataclass(eq=False)  # two pages that know the same are still two
class Subscriber:
    """One page that listens."""

    generation: int
    watched: Collection[str]
    is_complete: bool | None = None
    """What it was last told."""
    grown: dict[str, set[str]] = field(default_factory=dict)
    """Runs by the kind of what grew: metrics or logs."""


class LiveUpdates:
    """The pages that listen, and the thread that keeps the index up to date for them."""

    def __init__(self, index: RunIndex) -> None:
        self.slurm = SlurmAnswers(self._wake_up)
        self._index = index
        self._news = threading.Condition()
        self._subscribers: list[Subscriber] = []
        self._thread: threading.Thread | None = None
        self._wants_check = False
        self.foreign = ForeignKeeper(index, self.wait_for_listeners, self.tell, self.tell_growth)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def request_check(self) -> None:
        """Have the index brought up to date in the background, once."""
        with self._news:
            self._wants_check = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="board-index", daemon=True)
                self._thread.start()
            self._news.notify_all()
        self._wake_up()

    def listen(self, generation: int, watched: Collection[str]) -> Iterator[bytes]:
        """Yield what one page hears, as server-sent events, until the iterator is closed.

        `watched` are the ids of runs whose growth it hears of. They are looked at again and again,
        so they may change, in any thread.
        """
        if self._index.get_changes(generation) is None:
            yield format_event("reload", {})
            return
        subscriber = Subscriber(generation, watched)
        with self._news:
            if len(self._subscribers) >= _MAX_PAGES:
                raise RequestError(f"{_MAX_PAGES} pages are open already", "close some")
            self._subscribers.append(subscriber)
        self.request_check()
        self.foreign.start()
        try:
            yield b": connected\n\n"
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._has_news(subscriber), _BEAT_S)
                    events = self._collect(subscriber)
                yield b"".join(events) or b": still here\n\n"
                if any(event.startswith(b"event: reload") for event in events):
                    return
                time.sleep(_PAUSE_S)
        finally:
            with self._news:
                self._subscribers.remove(subscriber)
            self._wake_up()

    def tell(self) -> None:
        """Wake up the pages: the index has changed."""
        with self._news:
            self._news.notify_all()

    def tell_growth(self, kind: str, run_ids: set[str]) -> None:
        """Tell the pages that watch one of these runs that its metrics or logs grew."""
        with self._news:
            for subscriber in self._subscribers:
                if mine := run_ids.intersection(subscriber.watched):
                    subscriber.grown.setdefault(kind, set()).update(mine)
            self._news.notify_all()

    def wait_for_listeners(self) -> None:
        """Wait until a page is connected."""
        with self._news:
            self._news.wait_for(lambda: bool(self._subscribers))

    def _is_needed(self) -> bool:
        return self._wants_check or bool(self._subscribers)

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _has_news(self, subscriber: Subscriber) -> bool:
        return (
            bool(subscriber.grown)
            or subscriber.generation != self._index.generation
            or subscriber.is_complete != self._index.is_complete
        )

    def _collect(self, subscriber: Subscriber) -> list[bytes]:
        events: list[bytes] = []
        if (
            subscriber.generation != self._index.generation
            or subscriber.is_complete != self._index.is_complete
        ):
            changes = self._index.get_changes(subscriber.generation)
            if changes is None:
                return [format_event("reload", {})]
            subscriber.generation = changes.generation
            subscriber.is_complete = changes.is_complete
            events.append(
                b'event: rows\ndata: {"generation":%d,"complete":%b,"changed":[%b],"removed":%b}'
                b"\n\n"
                % (
                    changes.generation,
                    b"true" if changes.is_complete else b"false",
                    b",".join(changes.changed),
                    json.dumps(changes.removed).encode(),
                )
            )
        grown, subscriber.grown = subscriber.grown, {}
        events += [format_event(kind, {"runs": sorted(runs)}) for kind, runs in grown.items()]
        return events

    # --- the thread ---

    def _keep(self) -> None:
        """Keep the index up to date while pages are connected, and check it once when asked."""
        while True:
            with self._news:
                self._news.wait_for(self._is_needed)
            try:
                self._keep_while_needed()
            except Exception:  # a bug of ours must not leave pages without news for ever
                import traceback

                traceback.print_exc()
                time.sleep(_BEAT_S)

    def _keep_while_needed(self) -> None:
        from echelon.board.index_keeper import IndexKeeper

        keeper = IndexKeeper(self._index, self.slurm, self.tell)
        try:
            keeper.begin()
            while True:
                with self._news:
                    # Without a page nothing is read: what is heard of meanwhile waits.
                    if not self._news.wait_for(self._is_needed, _LINGER_S):
                        break
                    self._wants_check = False
                    watched = {each for s in self._subscribers for each in s.watched}
                began = time.monotonic()
                for kind, run_ids in keeper.look(watched).items():
                    if run_ids:
                        self.tell_growth(kind, run_ids)
                # What comes in bursts is taken together.
                time.sleep(max(0.0, _PAUSE_S - (time.monotonic() - began)))
                keeper.wait(self._wake)
                self._clear_wake()
        finally:
            keeper.end()
            self.tell()

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def format_event(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def stream_events(request: Request) -> StreamResponse:
    """Answer with events from a generation on."""
    generation = request.get_int("generation", 0)
    watched = request.get_all("watch")[:_MAX_WATCHED]
    pieces = request.board.watch.listen(generation, watched)
    return StreamResponse(pieces, "text/event-stream; charset=utf-8")


ROUTES: list[Route] = [("GET", "/api/events", stream_events)]
