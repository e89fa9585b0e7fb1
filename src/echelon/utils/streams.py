"""The standard streams of a process: closed at its start, on a full disk, or read by nobody."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""Name and mode of each, at the index of its descriptor."""


def open_missing_streams() -> None:
    """Give this process /dev/null for every standard stream that is closed, as after ``>&-``.

    Without it the next file that is opened gets the free descriptor 0, 1 or 2, and everything that
    is printed, here or in a child process, is written into that file. Python itself has no
    ``sys.stdout`` then: it is None, and a ``print`` to a closed stderr goes to stdout.
    """
    opened = []
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(descriptor, True)  # child processes need them as much
        opened.append(descriptor)
    os.close(descriptor)
    for descriptor, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, f"__{name}__") is None:
            # Somebody else's file may have got the descriptor before we came.
            file = descriptor if descriptor in opened else os.devnull
            stream = open(file, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, f"__{name}__", stream)
            if getattr(sys, name) is None:
                setattr(sys, name, stream)


class TolerantStream(io.TextIOBase):
    """A text stream that never raises because nothing can be written.

    What a full disk does not take is tried again with the next text, as far as the buffer of the
    stream reaches, and lost after that. When the reader has left (`… | head`, a closed terminal),
    everything goes to /dev/null from then on.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError as error:
            self._handle_error(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._handle_error(error)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # such as `buffer` and `reconfigure`

    def give_up_unwritten(self) -> None:
        """Drop what can still not be written, and all that follows: Python ends with an error if it
        is left in the buffer."""
        try:
            self.stream.flush()
        except OSError:
            self._redirect_to_null()

    def _handle_error(self, error: OSError) -> None:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


@contextlib.contextmanager
def use_tolerant_streams() -> Iterator[None]:
    """Let no `print` of this process fail meanwhile: a training outlives its screen and its log."""
    before = sys.stdout, sys.stderr
    tolerant = [TolerantStream(stream) for stream in before]
    sys.stdout, sys.stderr = tolerant
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in tolerant:
            stream.give_up_unwritten()
