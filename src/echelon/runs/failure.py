"""The first failure of a world: what every log and screen ends with, whatever fails after it."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import sys
import sysconfig
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode
from echelon.utils.text import truncate_text

_MAX_SUMMARY_CHARACTERS = 200
"""A longer text fills the screen of `echelon jobs`; the detail has all of it."""
SUPERSEDED_ROUND = "a rank was lost, and the others go on in another round"
"""The summary of what a rank finds in the place of a failure where it need not wait any more."""


@dataclass(frozen=True)
class Failure:
    """What failed first, where and at which step. Sent between processes as JSON."""

    rank: int
    host: str
    step: int | None
    summary: str
    """One line of at most 200 characters."""
    detail: str
    """The traceback, or what to do about it."""
    exit: int = int(ExitCode.FAILED)
    of_program: bool = False
    """Whether a program of `echelon run` failed; its steps are not known."""
    may_be_machine: bool = False
    """Whether the machine may be at fault: the process was killed by a signal, or hung."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        at = "before the first step" if self.step is None else f"after step {self.step}"
        who = f"rank {self.rank} on {self.host}"
        if self.detail.startswith("error: "):
            return f"{self.detail}\n  {who}" + ("" if self.of_program else f", {at}")
        failed = "failed" if self.of_program else f"failed {at}"
        return f"{self.detail.rstrip()}\n\n{who} {failed}: {self.summary}".lstrip()


def make_failure_from_exception(
    error: BaseException, rank: int, step: int | None, hint: str = ""
) -> Failure:
    """Return the failure of an exception. A fault keeps its sentences; anything else keeps its
    traceback."""
    host = socket.gethostname()
    if isinstance(error, EchelonError):
        detail = "\n".join(f"error: {fault}" for fault in error.faults)
        return Failure(rank, host, step, shorten_to_line(error.faults[0].what), detail, error.exit)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, host, step, "interrupted", "", ExitCode.INTERRUPTED)
    original = _read_original_traceback(error)
    detail = original.detail if original else format_user_traceback(error)
    detail += f"  hint: {hint}\n" if hint else ""
    return Failure(rank, host, step, shorten_to_line(format_message(error)), detail)


def shorten_to_line(text: str) -> str:
    """Return a text of any length and any number of lines as one line of a summary."""
    return truncate_text(" ".join(text.split()), _MAX_SUMMARY_CHARACTERS)


def format_message(error: BaseException) -> str:
    """Return the type and the message of an exception, without the notes that were added to it.

    Of an exception that torch has brought from a loader process, they are those of the original.
    """
    if original := _read_original_traceback(error):
        return original.message
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return traceback.format_exception_only(error)[0]


def format_user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's first frame on, or all of it if no frame is the
    user's, since the mistake may then be ours."""
    user_frames = find_user_frame_indices(error)
    first = user_frames[0] if user_frames else 0
    if isinstance(error, SyntaxError) and not user_frames:
        return "".join(traceback.format_exception(type(error), error, None))
    shown = error.__traceback__
    for _ in range(first):
        shown = shown.tb_next if shown is not None else None
    return "".join(traceback.format_exception(type(error), error, shown))


def find_user_frame_indices(error: BaseException) -> list[int]:
    """Return the indices of the frames of a traceback that are in the user's files."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [i for i, file in enumerate(files) if not file.startswith(_NON_USER_PREFIXES)]


def is_from_user_code(error: BaseException) -> bool:
    """Return whether a line of the user's is in the traceback, here or in a loader process."""
    original = _read_original_traceback(error)
    return original.is_from_user_code if original else bool(find_user_frame_indices(error))


def find_last_user_line(error: BaseException) -> str | None:
    """Return FILE:LINE of the user's line that is nearest to where an exception was raised."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
    user_frames = find_user_frame_indices(error)
    return lines[user_frames[-1]] if user_frames else None


_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
# An environment may see the packages of another: venv --system-site-packages, a .pth file.
_INSTALLED += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
_NON_USER_PREFIXES = (str(Path(__file__).parents[1]), "<frozen ", *_INSTALLED)


class OriginalTraceback(NamedTuple):
    """What went wrong in a loader process or another thread, which torch raises here again."""

    message: str
    """The type and the message of the exception that was raised there."""
    detail: str
    """Where it was raised, and its traceback from the user's first frame on."""
    is_from_user_code: bool
    """Whether a line of the user's is in it."""


_RERAISED = re.compile(r"Caught \S+ (in [^\n]+)\.\nOriginal (Traceback \(.*)", re.DOTALL)
"""How torch's `ExceptionWrapper` writes an exception that it has brought from somewhere else."""
_TRACEBACK_HEADER = "Traceback (most recent call last):\n"


def _read_original_traceback(error: BaseException) -> OriginalTraceback | None:
    """Return the traceback that torch put into the message of an exception, or None.

    The exception's own traceback shows how torch raised it again, which helps nobody.
    """
    found = _RERAISED.search(str(error))
    if found is None:
        return None
    where, text = found[1], found[2].rstrip() + "\n"
    before, *blocks = text.split(_TRACEBACK_HEADER)
    frames = [re.split(r'^(?=  File ")', block, flags=re.MULTILINE) for block in blocks]
    starts = [_find_first_user_frame(block) for block in frames]
    shown = before + "".join(
        _TRACEBACK_HEADER + "".join(block[start or 0 :])
        for block, start in zip(frames, starts, strict=True)
    )
    last_lines = frames[-1][-1].splitlines() if frames else []
    message = "\n".join(itertools.dropwhile(lambda line: line.startswith("  "), last_lines))
    detail = f"{where[0].upper()}{where[1:]}:\n{shown}"
    return OriginalTraceback(message, detail, any(start is not None for start in starts))


def _find_first_user_frame(frames: list[str]) -> int | None:
    """Return the index of the user's first frame in a printed traceback, or None."""
    for index, frame in enumerate(frames):
        if frame.startswith('  File "') and not frame.split('"')[1].startswith(_NON_USER_PREFIXES):
            return index
    return None


def make_failure_from_exit_code(code: int, rank: int, step: int | None) -> Failure:
    """Return the failure of a process that died without reporting one."""
    if code < 0:
        name = signal.Signals(-code).name
        summary = f"killed by {name}"
        detail = {
            "SIGKILL": "The kernel kills so when memory runs out: see `dmesg | tail`.",
            "SIGSEGV": "A crash in compiled code: its log may end with the Python stack.",
        }.get(name, "")
    else:
        summary, detail = f"exited with code {code}", ""
    host = socket.gethostname()
    return Failure(rank, host, step, summary, detail, may_be_machine=code < 0)
