"""One agent of a start per host: where one is started again, the lost one must have ended first.

An agent that was cut off holds an election before it ends itself, and until then its ranks fill the
memory of the GPUs. The lock is a name that only the kernel keeps. The workers are forked from the
agent and keep it too, so it is free once the last of them has ended, however they did.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.world.network_key import derive_key, read_key

_POLL_S = 0.2


def lock_host(env: Mapping[str, str], limit_s: float) -> socket.socket | None:
    """Return the lock of the agent of this host, which lasts as long as its processes.

    Without a key there is none; with a limit of 0 it is not waited for. Raises EchelonError where
    the agent before still has it after `limit_s` seconds.
    """
    key = read_key(env)
    if key is None:
        return None
    lock = socket.socket(socket.AF_UNIX)
    name = "\0echelon-agent-" + derive_key(key, "host").hex()[:32]  # nobody else can guess it
    deadline = time.monotonic() + limit_s
    while True:
        try:
            lock.bind(name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            lock.close()
            if limit_s and error.errno == errno.EADDRINUSE:
                raise EchelonError(
                    Fault(
                        f"the agent that was lost on {socket.gethostname()} has not ended within "
                        f"{limit_s:g} s",
                        "look for a process that cannot be killed there, as one that waits for a "
                        "disk or a GPU",
                    ),
                    exit=ExitCode.FAILED,
                ) from None
            return None
        return lock
