"""The standard streams of a process that was started with one of them closed."""

from __future__ import annotations

import os
import sys

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
