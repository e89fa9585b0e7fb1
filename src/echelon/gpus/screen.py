"""A terminal that is drawn over in place: only the lines that changed are sent, so nothing flickers
and a slow connection keeps up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # a page of its own, no cursor, lines do not wrap
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # shown at once, by terminals that know how
_STYLE = re.compile(r"\x1b\[[\d;]*m")


class FullScreenTerminal:
    def __init__(self) -> None:
        self._shown: list[str] = []
        self._size = (0, 0)

    def invalidate(self) -> None:
        """The terminal shows something else by now."""
        self._size = (0, 0)

    def draw(self, lines: Sequence[str]) -> None:
        size = shutil.get_terminal_size()
        if size != self._size:  # what was drawn has been wrapped or cut
            self._shown, self._size = [], size
            sys.stdout.write("\x1b[2J")
        page = fit_to_height(lines, size.lines)
        changed = [
            f"\x1b[{number};1H{line}{_erase_rest(line, size.columns)}"
            for number, line in enumerate(page, 1)
            if number > len(self._shown) or self._shown[number - 1] != line
        ]
        if changed or len(page) < len(self._shown):
            rest = f"\x1b[{len(page) + 1};1H\x1b[J" if len(page) < len(self._shown) else ""
            sys.stdout.write(f"{_BEGIN}{''.join(changed)}{rest}{_END}")
            sys.stdout.flush()
        self._shown = page


def _erase_rest(line: str, columns: int) -> str:
    """Erases what stood there. A full line leaves the cursor on its last letter, not after it."""
    return "\x1b[K" if len(_STYLE.sub("", line)) < columns else ""


def fit_to_height(lines: Sequence[str], height: int) -> list[str]:
    if len(lines) <= height:
        return list(lines)
    hidden = len(lines) - height + 1
    return [*lines[: height - 1], f"… {hidden} more lines: --gpu or --user shows fewer"]


@contextmanager
def open_full_screen() -> Iterator[FullScreenTerminal]:
    """Whatever ends or stops it, the terminal is as it was."""
    terminal = FullScreenTerminal()

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def stop(number: int, frame: FrameType | None) -> None:
        """Ctrl-Z, until `fg`. Past Python's own buffer, which may be in use."""
        os.write(sys.stdout.fileno(), _LEAVE.encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        os.write(sys.stdout.fileno(), _ENTER.encode())
        terminal.invalidate()

    # INT too: a shell that starts its jobs in the background has it ignored.
    handlers = ((signal.SIGINT, end), (signal.SIGTERM, end), (signal.SIGTSTP, stop))
    before = {number: signal.signal(number, does) for number, does in handlers}
    sys.stdout.write(_ENTER)
    try:
        yield terminal
    finally:
        for number, did in before.items():
            signal.signal(number, did)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
