"""What pages hear without asking: rows that changed, and runs whose metrics or logs grew.

One thread looks at the runs while at least one page is connected, and nobody does otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.board.request import Request, Response, Route, StreamResponse
from echelon.board.run_index import RunIndex

_LOOK_S = 1.0
_BEAT_S = 15.0
_PAUSE_S = 0.25
"""At most four events a second."""


@dataclass
class Subscriber:
    """One page that listens."""

    generation: int
    watched: tuple[str, ...]
    grown: dict[str, set[str]] = field(default_factory=dict)
    """Runs by the kind of what grew: metrics or logs."""


class LiveUpdates:
    """Keeps the index of runs up to date while a page listens."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._news = threading.Condition()
        self._subscribers: list[Subscriber] = []
        self._thread: threading.Thread | None = None
        self._wants_check = False

    def request_check(self) -> None:
        """Have all rows compared with their folders, in the background."""
        with self._news:
            self._wants_check = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="board-look", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def tell(self) -> None:
        """Wake up all pages that listen."""
        with self._news:
            self._news.notify_all()

    def listen(self, generation: int, watched: Sequence[str]) -> Iterator[bytes]:
        """Yield the events of one page until it goes."""
        if self._index.get_changes(generation) is None:
            yield format_event("reload", {})
            return
        subscriber = Subscriber(generation, tuple(watched))
        with self._news:
            self._subscribers.append(subscriber)
        self.request_check()
        try:
            yield b": connected\n\n"
            while True:
                events = self._collect(subscriber)
                if events:
                    yield b"".join(events)
                    time.sleep(_PAUSE_S)
                    continue
                with self._news:
                    woken = self._news.wait(_BEAT_S)
                if not woken:
                    yield b": still here\n\n"
        finally:
            with self._news:
                self._subscribers.remove(subscriber)

    def _collect(self, subscriber: Subscriber) -> list[bytes]:
        events: list[bytes] = []
        changes = self._index.get_changes(subscriber.generation)
        if changes is not None and changes.generation != subscriber.generation:
            subscriber.generation = changes.generation
            events.append(
                b'event: rows\ndata: {"generation":%d,"complete":%b,"changed":[%b],'
                b'"removed":%b}\n\n'
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

    def _look(self) -> None:
        sizes: dict[tuple[str, str], int] = {}
        while True:
            with self._news:
                while not self._subscribers and not self._wants_check:
                    self._news.wait()
                self._wants_check = False
            self._index.check(self.tell)
            self._index.save()
            with self._news:
                for subscriber in self._subscribers:
                    for run_id in subscriber.watched:
                        for kind, size in self._measure(run_id).items():
                            if sizes.get((run_id, kind)) not in (None, size):
                                subscriber.grown.setdefault(kind, set()).add(run_id)
                            sizes[run_id, kind] = size
                self._news.notify_all()
                self._news.wait_for(lambda: self._wants_check, _LOOK_S)

    def _measure(self, run_id: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with contextlib.suppress(Exception):
            folder = self._index.find_folder(run_id)
            found["metrics"] = (folder / "metrics.jsonl").stat().st_size
            with os.scandir(folder / "logs") as entries:
                found["logs"] = sum(entry.stat().st_size for entry in entries)
        return found


def format_event(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def stream_events(request: Request) -> StreamResponse | Response:
    """Answer with events from a generation on."""
    generation = request.get_int("generation", 0)
    watched = request.get_all("watch")[:200]
    pieces = request.board.watch.listen(generation, watched)
    return StreamResponse(pieces, "text/event-stream; charset=utf-8")


ROUTES: list[Route] = [("GET", "/api/events", stream_events)]
