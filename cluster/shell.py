"""Running commands, waiting for conditions, and the two ways this can end badly."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence


class CannotBeMade(Exception):
    """This machine lacks what a cluster needs; the message is one sentence that says what."""


class Broken(Exception):
    """It could be made here, and went wrong; the message shows the end of the right log."""


def run(command: Sequence[str], env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Standard output of a command that has to work."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise Broken(f"`{' '.join(command)}` ended with {done.returncode}: {said}")
    return done.stdout


def works(command: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Return whether a command ends with code 0; its output is discarded."""
    quiet = subprocess.DEVNULL
    return subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, env=env).returncode == 0


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Return whether a condition became true within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
