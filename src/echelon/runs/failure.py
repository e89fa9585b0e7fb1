"""The first failure of a world: what every log and screen ends with, whatever fails after it."""

from __future__ import annotations

import json
import signal
import socket
import sys
import sysconfig
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.errors import EchelonError, ExitCode


@dataclass(frozen=True)
class Failure:
    """What failed first, where and at which step. Sent between processes as JSON."""

    rank: int
    host: str
    step: int | None
    summary: str
    """One line."""
    detail: str
    """The traceback, or what to do about it."""
    exit: int = int(ExitCode.FAILED)
    of_program: bool = False
    """Whether a program of `echelon run` failed; its steps are not known."""

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
    if isinstance(error, EchelonError):
        detail = "\n".join(f"error: {fault}" for fault in error.faults)
        return Failure(rank, socket.gethostname(), step, error.faults[0].what, detail, error.exit)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, socket.gethostname(), step, "interrupted", "", ExitCode.INTERRUPTED)
    summary = traceback.format_exception_only(error)[-1].strip()
    detail = format_user_traceback(error) + (f"  hint: {hint}\n" if hint else "")
    return Failure(rank, socket.gethostname(), step, summary, detail)


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


_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
# An environment may see the packages of another: venv --system-site-packages, a .pth file.
_INSTALLED += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
_NON_USER_PREFIXES = (str(Path(__file__).parents[1]), "<frozen ", *_INSTALLED)


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
    return Failure(rank, socket.gethostname(), step, summary, detail)
