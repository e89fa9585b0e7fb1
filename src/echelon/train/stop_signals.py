"""Stops a run on request: a signal only sets a flag, and the ranks agree on it after a step."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from echelon.errors import ExitCode
from echelon.world.rounds import AGENT_STOPS_VARIABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
_ON_ITS_WAY_S = 3.0
"""Slurm and ssh bring a signal to one node after the other."""


class StopSignals:
    """Whether a stop was requested, and by which signal."""

    def __init__(self) -> None:
        self.is_requested = False
        self.reason = ""
        self.requested_s = 0.0
        """When the first request came, by time.monotonic()."""
        self.is_over = False
        """Everything is saved and reported: nothing is left to stop."""
        self._handlers_before: dict[int, Any] = {}

    def install(self) -> None:
        """Installs the signal handlers. Python allows that only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets the main thread alone handle signals
        self._handlers_before = {
            number: signal.signal(number, self._handle) for number in STOP_SIGNALS
        }
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, STOP_SIGNALS
        )  # the parent process may have blocked them
        if os.environ.get(AGENT_STOPS_VARIABLE):
            for number in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
        atexit.register(_ignore_signals)

    def find_reason(self) -> str:
        """Return the signal that stopped this run. Where another rank has heard of it first, it is
        on its way to this one too, unless it was sent to the other alone."""
        deadline = time.monotonic() + _ON_ITS_WAY_S
        while not self.reason and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.reason or "a signal to another rank"

    def uninstall(self) -> None:
        """Give the signals back to whoever handled them before, where the process goes on."""
        for number, handler in self._handlers_before.items():
            if handler is not None:  # it was not installed by Python
                signal.signal(number, handler)
        atexit.unregister(_ignore_signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Notes the request; a second Ctrl-C ends the process at once."""
        if self.is_over:
            return
        name = signal.Signals(number).name
        if self.is_requested and number == signal.SIGINT:
            sys.stderr.write("\x1b[?25h\nstopped at once; the last snapshot is intact\n")
            sys.stderr.flush()
            os._exit(ExitCode.INTERRUPTED)
        if number == signal.SIGINT and not self.is_requested:
            sys.stderr.write("\nstopping after this step and saving; Ctrl-C again stops at once\n")
        if not self.is_requested:
            self.requested_s = time.monotonic()
        self.is_requested = True
        self.reason = self.reason or name


def _ignore_signals() -> None:
    """Ignores the signals while the process ends.

    Python restores the default handlers before it ends; a signal would then kill a run that is over
    and replace its exit code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
