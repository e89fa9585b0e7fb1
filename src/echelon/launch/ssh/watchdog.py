"""The far end of launch=ssh: `echelon node --tether` lives as long as its launcher sends messages.

There are two processes. This one is the watchdog: it reads the launcher's messages from standard
input, imports nothing heavy and waits for nobody. So whatever the agent is stuck in, a cut link or
a dead launcher ends the node. The other process, its child, is the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import psutil

from echelon.errors import ExitCode
from echelon.hosts.message_protocol import send_message
from echelon.launch.node.fork_server import STOP_SIGNALS
from echelon.launch.node.join import join_run
from echelon.launch.ssh.own_address import find_reached_address
from echelon.runs.failure import Failure
from echelon.utils.processes import die_with_parent

SILENCE_LIMIT_S = 15.0
"""After so long without a message the link is cut, though nobody closed it."""

_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 5.0


def run_watched_node(folder: str, nodes: int, rank: int, procs: int | None) -> int:
    """Run the agent of a node until it ends, a request to end arrives, or the connection is lost;
    returns the agent's exit code."""
    # What outlives the agent becomes a child of this process, and is killed with it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    theirs, ours = os.pipe()
    watchdog_pid = os.getpid()
    agent = os.fork()
    if agent == 0:
        os.close(ours)
        _set_up_agent_process(watchdog_pid)
        find_master = partial(_read_master_address, nodes, rank, theirs)
        on_port = partial(_report_port, nodes)
        return join_run(
            folder, nodes, find_master, rank, procs, on_port, _report_failure, _report_nodes
        )
    os.close(theirs)
    try:
        return _NodeWatchdog(agent, ours).watch_until_end()
    finally:
        _kill_descendants()


class _NodeWatchdog:
    """Reads the launcher's messages and watches the agent."""

    def __init__(self, agent: int, master_pipe: int) -> None:
        self._agent = agent
        self._master_pipe = master_pipe
        self._last_heard = time.monotonic()
        self._wake, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGUSR2):  # notice to this node, from outside
            signal.signal(number, lambda number, frame: os.kill(agent, number))

    def watch_until_end(self) -> int:
        """Wait for the agent's end, or for that of the launcher; returns the exit code."""
        text = b""
        while (code := self._reap_agent()) is None:
            left_s = self._last_heard + SILENCE_LIMIT_S - time.monotonic()
            ready, _, _ = select.select([0, self._wake], [], [], max(0.0, left_s))
            if self._wake in ready:
                os.read(self._wake, 4096)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                *lines, text = (text + data).split(b"\n")
                if not data or not all(self._handle_message(json.loads(line)) for line in lines):
                    return ExitCode.INTERRUPTED
                self._last_heard = time.monotonic()
            elif left_s <= 0:
                return ExitCode.NODE_LOST
        return code

    def _reap_agent(self) -> int | None:
        """Return the agent's exit code once it has one. Orphans are children of this process too,
        and are reaped."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._agent:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        return None

    def _handle_message(self, message: dict[str, Any]) -> bool:
        """Handle a message of the launcher; returns whether to continue."""
        if "meet" in message:
            with contextlib.suppress(OSError):  # the agent knows a leader, and reads no more
                os.write(self._master_pipe, message["meet"].encode() + b"\n")
        elif "signal" in message:
            os.kill(self._agent, message["signal"])
        return "kill" not in message


def _kill_descendants() -> None:
    """Kill everything that this node has started, also what a program put into the background."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


# --- in the agent ---


def _set_up_agent_process(parent: int) -> None:
    """Make this child process the agent: no input, stop signals blocked, lines printed at once."""
    die_with_parent(parent)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # A stop signal that comes early waits until the agent handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # rank 0 inherits it


def _read_master_address(nodes: int, rank: int, master_pipe: int) -> str:
    """HOST:PORT of node 0. Node 0 itself uses its own address and a port that it will choose; the
    others read it from the watchdog."""
    if rank == 0:
        return f"{find_reached_address(nodes, os.environ)}:0"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch  # noqa: F401  while node 0 does the same

    return os.fdopen(master_pipe, encoding="utf-8").readline().strip()


def _report_port(nodes: int, port: int) -> None:
    """Send the launcher the address of the leader's store."""
    _send_to_launcher({"meet": f"{find_reached_address(nodes, os.environ)}:{port}"})


def _report_nodes(nodes: list[int], left_nodes: list[int]) -> None:
    """Tell the launcher which nodes go on, and which ones have left on purpose."""
    _send_to_launcher({"nodes": nodes, "left": left_nodes})


def _report_failure(failure: Failure) -> None:
    """Send the launcher the failure. It prints it after everything that the hosts still print."""
    _send_to_launcher({"failure": asdict(failure)})


def _send_to_launcher(message: dict[str, Any]) -> None:
    """Print a message, marked so that the launcher finds it among what programs print."""
    send_message(message)
