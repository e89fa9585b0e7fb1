"""Follow the output of a run over all its restarts and requeues, until the run is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from echelon.jobs.log_reader import LogFile, LogLine, merge_logs
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.runs.status import RunStatus, read_run_status

INITIAL_LINES = 20
_POLL_S = 0.2
_STATUS_POLL_S = 0.5
"""Between two readings of the run's status."""
_SLURM_POLL_S = 3.0
"""Between two readings where each one asks Slurm, whose controller serves the whole cluster."""
_LOST_CONFIRMATIONS = 3
"""A run counts as lost after so many readings in a row: on a network file system the files of other
machines become visible late."""
_FINAL_OUTPUT_S = 1.0
"""How long to read on after the end: a run writes its last lines after its final status."""
_CLOSE_TIMEOUT_S = 30.0
"""How long to wait then for its process to exit: closing trackers takes a while."""


class LogPrinter(Protocol):
    """Shows lines of logs."""

    whole_lines: bool
    """Whether it takes only whole lines. Otherwise it is given whatever was written so far, such as
    the carriage returns of a progress bar."""

    def print_log_line(self, line: LogLine) -> None:
        """Show a line, perhaps only when `flush` is called."""

    def flush(self) -> None:
        """Write what is buffered. It is called when there is no more output for now."""


class PlainPrinter:
    """Writes logs as they were written, progress bars included."""

    whole_lines = False

    def print_log_line(self, line: LogLine) -> None:
        sys.stdout.buffer.write(line.text)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def follow_run(
    run: Run,
    list_names: Callable[[], Sequence[str]],
    printer: LogPrinter,
    initial_lines: int,
    on_status: Callable[[RunStatus], None] = lambda status: None,
) -> RunStatus:
    """Show these logs until the run is over, and return its last status.

    ``list_names`` is called again and again, because logs may appear later; ``on_status`` is called
    with every status that is read.
    """
    logs = {name: LogFile(run, name) for name in list_names()}
    for line in merge_logs(
        run, list(logs.values()), initial_lines, include_partial=not printer.whole_lines
    ):
        printer.print_log_line(line)
    status = None
    for status in _poll_status(run):
        on_status(status)
        for name in list_names():
            log = logs.setdefault(name, LogFile(run, name))
            for text in log.read_lines() if printer.whole_lines else log.read_blocks():
                printer.print_log_line(LogLine(time.time(), name, text))
        printer.flush()
    for name in list_names():
        for text in logs.setdefault(name, LogFile(run, name)).read_lines(include_partial=True):
            printer.print_log_line(LogLine(time.time(), name, text))
    printer.flush()
    assert status is not None
    return status


def _poll_status(run: Run) -> Iterator[RunStatus]:
    """Yield the status of a run again and again until it is over and its last output can be
    read."""
    times_lost = 0
    while True:
        status = read_run_status(run)
        times_lost = times_lost + 1 if status.state in ("lost", "unknown") else 0
        is_over = not status.is_active and times_lost in (0, _LOST_CONFIRMATIONS)
        wait_s = _FINAL_OUTPUT_S if is_over else _SLURM_POLL_S if status.job else _STATUS_POLL_S
        until = time.monotonic() + wait_s
        is_waiting = True
        while is_waiting:
            yield status
            time.sleep(_POLL_S)
            # A status is read rarely, but the exit code file ends the wait at once: its existence
            # costs one `stat`, not a request to Slurm.
            is_waiting = time.monotonic() < until and (is_over or not run.exit_code_file.exists())
            is_waiting = is_waiting or (is_over and _is_process_closing(run))
        if is_over:
            return


def _is_process_closing(run: Run) -> bool:
    """Return whether the run has ended and its process on this machine is still closing, e.g. a
    tracker."""
    status = run.read_status_file()
    ended = status.get("updated")
    recent = isinstance(ended, (int, float)) and time.time() - ended < _CLOSE_TIMEOUT_S
    return recent and bool(is_alive(status.get("process")))
