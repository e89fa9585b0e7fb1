"""Stopping on request: a handler only sets a flag; the ranks agree on it at a step boundary."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

from echelon.errors import Exit

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Stop:
    """The wish to stop, and who asked."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""
        self.over = False
        """All is saved and said: there is nothing left to stop."""

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets the main thread alone handle signals
        for number in SIGNALS:
            signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # held back by what started us
        atexit.register(_be_deaf)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        name = signal.Signals(number).name
        if self.requested and number == signal.SIGINT:
            sys.stderr.write("\x1b[?25h\nstopped at once; the last snapshot stands\n")
            sys.stderr.flush()
            os._exit(Exit.INTERRUPTED)
        if number == signal.SIGINT and not self.requested:
            sys.stderr.write("\nstopping after this step and saving; Ctrl-C again stops at once\n")
        self.requested = True
        self.reason = self.reason or name


def _be_deaf() -> None:
    """Python gives signals back to the system before it ends, which would kill a run that is over
    and take its exit code along."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
