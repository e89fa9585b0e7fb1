"""A command at a terminal: a pty that a test types at, and what the command has shown there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


class TypedTerminal:
    """The end of a pty at which a person would sit."""

    def __init__(self, handle: int, process: subprocess.Popen[bytes]) -> None:
        self._handle, self.process = handle, process
        self.shown = ""

    def type_line(self, text: str) -> None:
        self.type_keys(f"{text}\n")

    def type_keys(self, text: str) -> None:
        """Type what may be a part of a line, with keys such as Tab."""
        os.write(self._handle, text.encode())

    def wait_for(self, text: str, limit_s: float) -> str:
        """Wait until a text is on the screen; returns all up to its end, and forgets it."""
        deadline = time.monotonic() + limit_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} within {limit_s} s in:\n{self.shown}"
            self._read(0.1)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait(self, limit_s: float) -> int:
        """Wait for the command; what it shows meanwhile is kept in `shown`."""
        deadline = time.monotonic() + limit_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"still running after {limit_s} s:\n{self.shown}"
            self._read(0.1)
        while self._read(0.0):
            pass
        return code

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._handle], [], [], timeout_s)
        with suppress(OSError):  # nobody has it open any more
            if ready and (data := os.read(self._handle, 1 << 16)):
                self.shown += data.decode(errors="replace")
                return True
        return False


@contextmanager
def open_terminal(words: Sequence[str], folder: Path, **variables: str) -> Iterator[TypedTerminal]:
    """A command with a terminal of its own, which is its controlling one. It is hung up, and the
    command killed, when the block ends."""
    handle, inner = pty.openpty()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "SHELL": "/bin/bash", **variables},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    try:
        yield TypedTerminal(handle, process)
    finally:
        with suppress(OSError):
            os.close(handle)
        process.kill()
        process.wait()
