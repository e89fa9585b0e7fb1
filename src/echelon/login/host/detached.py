"""Work that goes on when the connection is lost that asked for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable


def start_detached(work: Callable[[], None]) -> int:
    """Do something in a process of its own session that holds nothing of the connection's open;
    returns its id. An error in it is nobody's to hear."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.closerange(3, 256)
        with contextlib.suppress(Exception):
            work()
    finally:
        os._exit(0)
