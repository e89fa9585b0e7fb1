"""What a person reads when something is wrong, and the exit codes with names.

A :class:`Fault` is the user's or the machine's: one sentence (what was set and what was found) and
one remedy. An :class:`EchelonError` carries every fault that was found, so that a person fixes them
in one go. Any other exception that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Every exit code of every command."""

    OK = 0
    FAILED = 1
    """The training, or the program it ran, failed."""
    USAGE = 2
    """What was typed or configured cannot be done; nothing was started."""
    NOT_FOUND = 3
    """What was asked for (a run, a GPU, a snapshot) does not exist here."""
    RENDEZVOUS = 4
    """The processes of a world did not find each other."""
    NODE_LOST = 5
    """A machine of the world went down or was cut off."""
    NO_GPU = 6
    """This machine has no NVIDIA GPU, or no driver that shows it."""
    BUSY = 7
    """Fewer GPUs are free than were asked for."""
    NOT_READY = 8
    """`doctor`, `preflight` or `setup` found what would keep a training from running there."""
    TRANSIENT = 9
    """A rank met an error that was marked as transient: it is replaced, and the others go on."""
    WRONG_NUMBERS = 10
    """A device computes wrong numbers without an error, as `trainer.verify_steps` found."""
    LEFT = 11
    """A node has left a run on purpose, and the others go on."""
    PREEMPTED = 75
    """Stopped on request with everything saved: requeue me (sysexits' EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """Stopped at once by a second Ctrl-C; the last snapshot is kept."""


def escape_controls(text: str, kept: str = "") -> str:
    """Return a text without characters by which a name of a file could command a terminal, or
    begin a line of its own; those in ``kept`` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else f"\\u{ord(c):04x}" for c in text)


class TransientError(Exception):
    """Raised by code of the user where trying again helps, such as a device that was lost.

    With several processes, the one that raised it is replaced, and the others go on with their
    state. Where that is not possible, it is an error like any other.
    """


class Fault(NamedTuple):
    """One thing that is wrong, and what to do about it."""

    what: str
    """One sentence: what was set and what was found."""
    do: str
    """What to do about it, as concretely as possible."""

    def __str__(self) -> str:
        # Names of files are in it, and any character may be in those.
        return escape_controls(f"{self.what}\n  hint: {self.do}", kept="\n\t")


class EchelonError(Exception):
    """One or more faults, printed without a traceback; `exit` is the exit code of the command."""

    def __init__(self, *faults: Fault, exit: ExitCode = ExitCode.USAGE) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults
        self.exit = exit


def suggest_other_folder(error: OSError, setting: str) -> str:
    """Return the remedy for a folder that cannot be written; only a full disk needs space."""
    place = f"give another place with {setting}"
    return f"free some space, or {place}" if error.errno in _DISK_FULL_ERRNOS else place


_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_MAX_LISTED_NAMES = 12


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that lists the known names, the nearest first. Of many names, only near ones
    are listed if there are any."""
    import difflib  # every command comes by here, and few guess

    names = sorted(known)
    as_written = {n.lower(): n for n in names}
    close_matches = difflib.get_close_matches(name.lower(), as_written, n=3, cutoff=0.5)
    close = [as_written[n] for n in close_matches]
    if close and len(names) > _MAX_LISTED_NAMES:
        others = f" also like it: {', '.join(close[1:])}" if close[1:] else ""
        return f"did you mean {close[0]!r}?{others}"
    rest = [n for n in names if n not in close]
    listed = ", ".join((close + rest)[:_MAX_LISTED_NAMES]) + (
        ", …" if len(names) > _MAX_LISTED_NAMES else ""
    )
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
