"""Copies what rank 0 prints to its log file; a progress bar goes to the screen alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO

from echelon.utils.streams import TolerantStream


class OutputTee:
    """While a log is open, standard output and standard error go to the screen and to the log."""

    def __init__(self) -> None:
        self._log: IO[str] | None = None
        self._original_streams = (sys.stdout, sys.stderr)

    def log_to(self, path: Path) -> None:
        """Starts copying to this file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", buffering=1, encoding="utf-8", errors="replace")
        sys.stdout = _TeeStream(self._original_streams[0], self._log)
        sys.stderr = _TeeStream(self._original_streams[1], self._log)

    def set_line_printer(self, show_line: Callable[[str], None] | None) -> None:
        """Lets `show_line` print whole lines, because it knows how to keep a progress bar below
        them."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _TeeStream):
                stream.show_line = show_line

    def close(self) -> None:
        """Restores the original streams and closes the log."""
        sys.stdout, sys.stderr = self._original_streams
        if self._log is not None:
            with contextlib.suppress(
                OSError
            ):  # closing writes what a full disk did not take before
                self._log.close()
            self._log = None


class _TeeStream(TolerantStream):
    """A text stream that writes to the screen and to a log. Neither may end a training by
    failing."""

    def __init__(self, screen: TextIO, log: IO[str]) -> None:
        super().__init__(screen)
        self.log = log
        self.show_line: Callable[[str], None] | None = None
        self._partial_line = ""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not end a training
            self.log.write(text)
        if self.show_line is None:
            return super().write(text)
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        try:
            for line in lines:
                self.show_line(line)
        except OSError as error:
            self._handle_error(error)
        return len(text)
