"""The first failure of a world: what every log and screen ends with, whoever else broke after."""

from __future__ import annotations

import json
import signal
import socket
import traceback
from dataclasses import asdict, dataclass

from echelon.errors import EchelonError, Exit


@dataclass(frozen=True)
class Failure:
    rank: int
    host: str
    step: int | None
    summary: str
    """One line."""
    detail: str
    """The traceback, or what to do about it."""
    exit: int = int(Exit.FAILED)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        at = "before the first step" if self.step is None else f"after step {self.step}"
        return (
            f"{self.detail.rstrip()}\n\nrank {self.rank} on {self.host} failed {at}: {self.summary}"
        )


def from_exception(error: BaseException, rank: int, step: int | None) -> Failure:
    """A user's mistake is told in sentences; anything else keeps its traceback."""
    if isinstance(error, EchelonError):
        detail = "\n".join(f"error: {fault}" for fault in error.faults)
        return Failure(rank, socket.gethostname(), step, error.faults[0].what, detail, error.exit)
    summary = traceback.format_exception_only(error)[-1].strip()
    detail = "".join(traceback.format_exception(error))
    return Failure(rank, socket.gethostname(), step, summary, detail)


def from_exit_code(code: int, rank: int, step: int | None) -> Failure:
    """For a process that died without a word."""
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
