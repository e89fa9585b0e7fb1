"""Stopping on request: a handler only sets a flag; the ranks agree on it at a step boundary."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

from echelon.errors import Exit

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopSignals:
    """The wish to stop, and who asked."""

    def __init__(self) -> None:
        self.is_requested = False
        self.reason = ""
        self.is_over = False
        """All is saved and said: there is nothing left to stop."""

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets the main thread alone handle signals
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back by what started us
        atexit.register(_ignore_signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            return
        name = signal.Signals(number).name
        if self.is_requested and number == signal.SIGINT:
            sys.stderr.write("\x1b[?25h\nstopped at once; the last snapshot stands\n")
            sys.stderr.flush()
            os._exit(Exit.INTERRUPTED)
        if number == signal.SIGINT and not self.is_requested:
            sys.stderr.write("\nstopping after this step and saving; Ctrl-C again stops at once\n")
        self.is_requested = True
        self.reason = self.reason or name


def _ignore_signals() -> None:
    """Python gives signals back to the system before it ends, which would kill a run that is over
    and take its exit code along."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
