"""A worker that is a program of somebody else: the program replaces this process."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from echelon.launch.node.fork_server import STOP_SIGNALS
from echelon.utils.os_errors import format_os_error_reason


def exec_program(*words: str) -> NoReturn:
    """Replace this process by the program; exits with 127 if it cannot be executed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back by what started us
    try:
        os.execvp(words[0], words)
    except OSError as error:
        host = os.uname().nodename
        print(
            f"error: {words[0]} cannot be run on {host}: {format_os_error_reason(error)}\n"
            "  hint: give its full path, or a command that is on the PATH of every node",
            file=sys.stderr,
            flush=True,
        )
        os._exit(127)
