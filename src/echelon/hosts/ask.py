"""Ask every host at the same time, and get an answer or a failure of each as a value."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from echelon.hosts.message_protocol import MARK
from echelon.utils.os_errors import format_os_error_reason

_MAX_PARALLEL = 64


class HostAnswer(NamedTuple):
    """What a command on a host printed, or why it did not come to an end."""

    exit_code: int | None
    """None where it could not be started or did not end in time: see ``failure``."""
    stdout: str
    stderr: str
    failure: str = ""
    """Why there is no exit code."""

    def read_message(self) -> dict[str, Any] | None:
        """Return the JSON object that the command printed, or None where there is none.

        It is the first message (see ``messages``), or else the output from the first brace on,
        for commands that print JSON for everybody.
        """
        _, mark, marked = self.stdout.partition(MARK)
        text = marked.partition("\n")[0] if mark else self.stdout[self.stdout.find("{") :]
        try:
            message = json.loads(text)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None


def ask_host(argv: Sequence[str], stdin: bytes, timeout_s: float) -> HostAnswer:
    """Run a command to its end, with this on its standard input; never raises for a host."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return HostAnswer(None, "", "", f"did not answer within {timeout_s:g} s")
    except OSError as error:
        return HostAnswer(None, "", "", f"{argv[0]} cannot be run: {format_os_error_reason(error)}")
    output = (done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    return HostAnswer(done.returncode, *output)


def ask_hosts(argvs: Sequence[Sequence[str]], stdin: bytes, timeout_s: float) -> list[HostAnswer]:
    """Run one command for each host, all at once up to 64; answers are in the order given."""
    with ThreadPoolExecutor(min(_MAX_PARALLEL, max(1, len(argvs)))) as pool:
        return list(pool.map(lambda argv: ask_host(argv, stdin, timeout_s), argvs))


def join_last_lines(text: str, lines: int = 2) -> str:
    """Return the end of what a command printed in one line, without frames such as ssh draws."""
    nonblank = [line.strip() for line in text.splitlines() if line.strip(" @\t")]
    return " ".join(nonblank[-lines:])
