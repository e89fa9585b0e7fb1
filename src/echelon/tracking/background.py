"""A tracker that runs in its own thread, so that the training never waits for it."""

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

from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine
from echelon.utils.text import truncate_text

_ABANDON_TIMEOUT_S = 5.0
"""How long the thread may take to end after `abandon` has removed what it waited for."""


class MetricsSink(Protocol):
    """Where a tracker puts lines; any method may take long, or fail."""

    settles_s: float
    """For so long after `put`, a line may still be lost when the process is killed."""

    def put(self, line: MetricsLine, row: int) -> None:
        """Add a line. `row` grows over all starts of the run, even where the step goes back."""

    def flush(self) -> None:
        """Pass on what was put; it is called after each batch of lines."""

    def close(self, outcome: ExitCode) -> None:
        """Finish with the outcome of the run. Nothing is put afterwards."""


PrintMessage = Callable[[str], None]


class TrackerProgress(NamedTuple):
    """How much of metrics.jsonl a tracker has received. It is kept in a file that survives a
    kill."""

    lines: int = 0
    """The number of lines of metrics.jsonl that a kill can no longer take from the sink."""
    rows: int = 0
    """The number of rows ever put. Lines that are repeated after a resume count again, so it only
    grows."""
    first_line: int = 0
    """Where the last start of the run began."""
    first_row: int = 0


OpenSink = Callable[
    [Sequence[MetricsLine], TrackerProgress, PrintMessage],
    tuple[MetricsSink, Sequence[MetricsLine]],
]
"""The lines of the run so far, what was left behind → the sink, the lines it is to be given."""


class BackgroundTracker:
    """Hands lines over to a sink in a thread, and warns once if that fails.

    A sink that missed lines, because it was killed, out of reach or chosen late, is brought up to
    date from metrics.jsonl when the run is resumed; `echelon resume` does so for a finished run.
    """

    def __init__(
        self,
        name: str,
        open_sink: OpenSink,
        past_lines: Sequence[MetricsLine],
        progress_file: Path,
        *,
        close_timeout_s: float,
        get_summary_rows: Callable[[], dict[str, str]],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._past_lines = past_lines
        self._progress_file = progress_file
        self._close_timeout_s = close_timeout_s
        self._get_summary_rows = get_summary_rows
        self._abandon = abandon
        self._queue: queue.SimpleQueue[MetricsLine | ExitCode] = queue.SimpleQueue()
        self._messages: deque[str] = deque()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name=f"track {name}")
        self._thread.start()

    # --- in the thread of the training ---

    def log(self, line: MetricsLine) -> None:
        """Queue a line, and print what the thread has to say. It returns at once."""
        if not self._has_failed:
            self._queue.put(line)
        self._print_messages()

    def close(self, outcome: ExitCode) -> dict[str, str]:
        """Wait for the sink to take what is queued, at most ``close_timeout_s``, and return rows
        for the summary of the run."""
        self._queue.put(outcome)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            # The failure first: `abandon` makes the thread fail too, with a less useful reason, and
            # only the first reason is printed.
            self._record_failure(f"it did not end within {self._close_timeout_s:g} s")
            self._abandon()
            self._thread.join(_ABANDON_TIMEOUT_S)
        self._print_messages()
        return self._get_summary_rows()

    def _print_messages(self) -> None:
        """Print messages of the thread. Done in the thread of the training: two threads would
        write into each other's lines."""
        while self._messages:
            print(self._messages.popleft(), file=sys.stderr)

    # --- in its own ---

    def _run_thread(self) -> None:
        try:
            self._write_lines()
        except Exception as error:
            self._record_failure(summarize_error(error))
            self._abandon()

    def _record_failure(self, reason: str) -> None:
        """Give up on the sink, and warn once."""
        if not self._has_failed:
            self._has_failed = True
            self._messages.append(
                f"warning: {self._name}: {reason}; the training goes on without it, and "
                "`echelon resume` brings it up to date from metrics.jsonl"
            )

    def _write_lines(self) -> None:
        """Body of the thread: open the sink, give it missing lines, then new ones until the end."""
        previous = _read_progress(self._progress_file)
        sink, missing_lines = self._open_sink(self._past_lines, previous, self._messages.append)
        file = os.open(self._progress_file, os.O_WRONLY | os.O_CREAT, 0o644)
        rows, lines = previous.rows, len(self._past_lines) - len(missing_lines)
        progress = TrackerProgress(lines, rows, first_line=lines, first_row=rows)
        not_yet_durable: deque[tuple[float, int]] = deque([(0.0, lines)])
        batch, outcome = list(missing_lines), None
        while True:
            # 1. The progress, before the rows are put: after a kill in between, row numbers are
            #    skipped. The other way round one would be given twice, and wandb would drop it.
            durable_lines = _count_durable_lines(not_yet_durable, sink.settles_s)
            _write_progress(file, progress._replace(lines=durable_lines, rows=rows + len(batch)))
            for line in batch:
                sink.put(line, rows)
                rows += 1
            # 2. Flush once per batch, not per line: for TensorBoard it is a write to the disk.
            sink.flush()
            # 3. Only from now on does the time count after which these lines are durable.
            lines += len(batch)
            not_yet_durable.append((time.monotonic(), lines))
            if outcome is not None:
                break
            batch, outcome = self._take_batch()
        sink.close(outcome)
        _write_progress(file, progress._replace(lines=lines, rows=rows))
        os.close(file)

    def _take_batch(self) -> tuple[list[MetricsLine], ExitCode | None]:
        """Return all queued lines, and the outcome of the run if this is the last batch."""
        batch: list[MetricsLine] = []
        item = self._queue.get()
        while not isinstance(item, ExitCode):
            batch.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item


def summarize_error(error: BaseException) -> str:
    """Return an exception of a library in one short line."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return truncate_text(text, 160)


def _count_durable_lines(not_yet_durable: deque[tuple[float, int]], durable_after_s: float) -> int:
    """Return how many lines a kill can no longer take from the sink."""
    until = time.monotonic() - durable_after_s
    while len(not_yet_durable) > 1 and not_yet_durable[1][0] <= until:
        not_yet_durable.popleft()
    return not_yet_durable[0][1]


def _read_progress(path: Path) -> TrackerProgress:
    """Return the progress in a file; zero if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return TrackerProgress(*json.loads(path.read_text(encoding="utf-8")))
    return TrackerProgress()


def _write_progress(file: int, progress: TrackerProgress) -> None:
    """Write the progress in place, in one write: a rename per batch would cost more than the
    lines."""
    os.pwrite(file, json.dumps(progress).ljust(64).encode(), 0)
