"""Rank 0's words go to the screen and to its log; a progress bar goes to the screen alone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO


class Output:
    """While a log is open, what the program prints is written to both."""

    def __init__(self) -> None:
        self._log: IO[str] | None = None
        self._kept = (sys.stdout, sys.stderr)

    def log_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = path.open("a", buffering=1, encoding="utf-8", errors="replace")
        sys.stdout = _Tee(self._kept[0], self._log)
        sys.stderr = _Tee(self._kept[1], self._log)

    def above(self, show: Callable[[str], None] | None) -> None:
        """Lines are shown by `show`, which knows of a bar on the screen."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Tee):
                stream.show = show

    def close(self) -> None:
        sys.stdout, sys.stderr = self._kept
        if self._log is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
                self._log.close()
            self._log = None


class _Tee(io.TextIOBase):
    def __init__(self, screen: TextIO, log: IO[str]) -> None:
        self.screen = screen
        self.log = log
        self.show: Callable[[str], None] | None = None
        self._line = ""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not end a training
            self.log.write(text)
        try:
            self._show(text)
        except OSError:  # nor must a reader that left: `… | head`, a terminal that was closed
            _silence(self.screen)
        return len(text)

    def _show(self, text: str) -> None:
        if self.show is None:
            self.screen.write(text)
            return
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.show(line)

    def flush(self) -> None:
        try:
            self.screen.flush()
        except OSError:
            _silence(self.screen)

    def isatty(self) -> bool:
        return self.screen.isatty()

    def fileno(self) -> int:
        return self.screen.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.screen.encoding


def _silence(stream: TextIO) -> None:
    """What it has not written yet, and all that comes, goes nowhere."""
    with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
