"""A tracker in a thread of its own: whatever it waits for, the training does not."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from echelon.errors import Exit
from echelon.track.lines import Line
from echelon.utils.text import truncate_text

_LAST_S = 5.0
"""For a thread to end once what it waited for was taken from it."""


class Sink(Protocol):
    """What lines are put into; any of it may take long, or fail."""

    settles_s: float
    """So long after it was put in, a line may still be lost when the process is killed."""

    def put(self, line: Line, row: int) -> None: ...

    def flush(self) -> None: ...

    def close(self, outcome: Exit) -> None: ...


Say = Callable[[str], None]


class Mark(NamedTuple):
    """What a sink has, in a file that outlives a kill."""

    lines: int = 0
    """Of metrics.jsonl, those that are safe with it."""
    rows: int = 0
    """Ever put in. Lines that come again after a resume are counted again, so it only grows."""
    first_line: int = 0
    """Where the last start of the run began."""
    first_row: int = 0


Open = Callable[[Sequence[Line], Mark, Say], tuple[Sink, Sequence[Line]]]
"""The lines of the run so far, what was left behind → the sink, the lines it is to be given."""


class Apart:
    """Hands lines over to a sink, and warns once when that fails.

    A sink that missed lines, because it was killed or out of reach or chosen late, is brought up to
    date from metrics.jsonl whenever the run goes on, and by `echelon resume` when it is finished.
    """

    def __init__(
        self,
        name: str,
        sink: Open,
        past: Sequence[Line],
        mark_file: Path,
        *,
        patience_s: float,
        last_words: Callable[[], dict[str, str]],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._open = sink
        self._past = past
        self._mark_file = mark_file
        self._patience_s = patience_s
        self._last_words = last_words
        self._abandon = abandon
        self._queue: queue.SimpleQueue[Line | Exit] = queue.SimpleQueue()
        self._words: deque[str] = deque()
        self._failed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"track {name}")
        self._thread.start()

    # --- in the thread of the training ---

    def log(self, line: Line) -> None:
        if not self._failed:
            self._queue.put(line)
        self._speak()

    def close(self, outcome: Exit) -> dict[str, str]:
        self._queue.put(outcome)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._fail(f"it did not end within {self._patience_s:g} s")
            self._abandon()
            self._thread.join(_LAST_S)
        self._speak()
        return self._last_words()

    def _speak(self) -> None:
        """Here and not where it happened: two threads would write into each other's lines."""
        while self._words:
            print(self._words.popleft(), file=sys.stderr)

    # --- in its own ---

    def _work(self) -> None:
        try:
            self._feed()
        except Exception as error:
            self._fail(brief(error))
            self._abandon()

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._words.append(
                f"warning: {self._name}: {reason}; the training goes on without it, and "
                "`echelon resume` brings it up to date from metrics.jsonl"
            )

    def _feed(self) -> None:
        before = _read(self._mark_file)
        sink, again = self._open(self._past, before, self._words.append)
        file = os.open(self._mark_file, os.O_WRONLY | os.O_CREAT, 0o644)
        rows, lines = before.rows, len(self._past) - len(again)
        mark = Mark(lines, rows, first_line=lines, first_row=rows)
        settling: deque[tuple[float, int]] = deque([(0.0, lines)])
        batch, outcome = list(again), None
        while True:
            # Ahead of the rows: after a kill none of their numbers is given again.
            safe = _settled(settling, sink.settles_s)
            _write(file, mark._replace(lines=safe, rows=rows + len(batch)))
            for line in batch:
                sink.put(line, rows)
                rows += 1
            sink.flush()
            lines += len(batch)
            settling.append((time.monotonic(), lines))
            if outcome is not None:
                break
            batch, outcome = self._next()
        sink.close(outcome)
        _write(file, mark._replace(lines=lines, rows=rows))
        os.close(file)

    def _next(self) -> tuple[list[Line], Exit | None]:
        """All that waits, and whether it is the last."""
        batch: list[Line] = []
        item = self._queue.get()
        while not isinstance(item, Exit):
            batch.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item


def brief(error: BaseException) -> str:
    """An error of somebody else's in one line."""
    said = str(error).strip().splitlines()
    text = said[0].rstrip(".") if said else type(error).__name__
    return truncate_text(text, 160)


def _settled(settling: deque[tuple[float, int]], settles_s: float) -> int:
    until = time.monotonic() - settles_s
    while len(settling) > 1 and settling[1][0] <= until:
        settling.popleft()
    return settling[0][1]


def _read(path: Path) -> Mark:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Mark(*json.loads(path.read_text(encoding="utf-8")))
    return Mark()


def _write(file: int, mark: Mark) -> None:
    """In place, in one piece: a rename for each batch would cost more than the lines."""
    os.pwrite(file, json.dumps(mark).ljust(64).encode(), 0)
