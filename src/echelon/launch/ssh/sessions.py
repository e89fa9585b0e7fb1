"""The near end of launch=ssh: one ssh per host, all output on one screen, one outcome."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import IO, Any, NamedTuple

from echelon.errors import ExitCode
from echelon.hosts.ask import join_last_lines
from echelon.hosts.message_protocol import split_message
from echelon.hosts.ssh import SSH_FAILED
from echelon.launch.node.fork_server import STOP_SIGNALS
from echelon.launch.plan import NodeReport
from echelon.runs.failure import Failure
from echelon.utils.processes import die_with_parent

_ALIVE_INTERVAL_S = 2.0
_TICK_S = 0.2
_GRACE_S = 10.0
"""How long the others have to report why and to end, once one host has failed; less if the
reason is known."""
_KILL_S = 3.0
_SUCCESS_CODES = (ExitCode.OK, ExitCode.PREEMPTED)
_RETURN_INTERVAL_S = 5.0
"""How often a lost host is tried again."""


class SshLaunchOutcome(NamedTuple):
    """How the run on all hosts ended."""

    code: int
    cause: str
    """What the screen ends with; empty if all went well."""
    failure: dict[str, Any] | None


@dataclass(eq=False)
class SshSession:
    """The agent of one host, at the far end of an ssh, or in a container on this machine."""

    node: int
    host: str
    process: subprocess.Popen[bytes]
    code: int | None = None
    """Set once it has ended and all its output was read."""
    host_index: int = 0
    is_return: bool = False
    """Whether it tries a host that was lost. What such a one prints before it takes part, mostly
    that the host cannot be reached, is not shown."""
    is_member: bool = True
    is_here: bool = False
    """Whether it is on this machine, so that there is no ssh and no host to name."""

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams: dict[IO[bytes], IO[str]] = {
            self.process.stdout: sys.stdout,
            self.process.stderr: sys.stderr,
        }
        self.partial_lines = dict.fromkeys(self.streams, b"")
        """The beginnings of lines."""
        self.last_stderr_lines: deque[str] = deque(maxlen=20)
        """Of its standard error."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. It is short enough to be written whole, whichever thread writes."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # who reads the other end notices that it is gone
            os.write(self.process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    @property
    def is_lost(self) -> bool:
        """Whether it ended as no agent ends by itself: ssh failed, or somebody killed it."""
        has_ssh_failed = self.code == SSH_FAILED and not self.is_here
        return self.code is None or self.code < 0 or has_ssh_failed or 128 < self.code < SSH_FAILED


def start_session(
    node: int, host_index: int, host: str, command: Sequence[str], first_line: bytes
) -> SshSession:
    """Start the agent of a node; `first_line` sets its variables."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is forwarded by this process
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(first_line)
    return SshSession(node, host, process, host_index=host_index)


class SshSessions:
    """All sessions, until the last one has ended."""

    def __init__(
        self,
        hosts: Sequence[str],
        start: Callable[[int, int], SshSession],
        silence_s: float = 14.0,
    ) -> None:
        """Start a session on every host: `start(host, node)`. A host that is lost while the others
        go on is tried again, with another number of its node."""
        self._start, self._silence_s = start, silence_s
        self._sessions = [start(host, host) for host in range(len(hosts))]
        self._width, self._host_count = max(map(len, hosts)), len(hosts)
        self._meet: dict[str, Any] | None = None
        """Where the leader is."""
        self._returns: dict[int, float] = {}
        """Host → when it is tried again."""
        self._next_node = len(hosts)
        self._selector = selectors.DefaultSelector()
        self._failed: SshSession | None = None
        """The first one that did."""
        self._reported_failure: Failure | None = None
        self._deadline = float("inf")
        self._kill_rounds = 0
        self._interrupts = 0
        self._is_stopping = False

    def wait_for_all(self) -> SshLaunchOutcome:
        """Print what the hosts print until all sessions have ended; returns the outcome."""
        for session in self._sessions:
            self._watch(session)
        # From a thread: a screen that is halted with Ctrl-S must not end the training.
        threading.Thread(target=self._send_keepalives, daemon=True, name="alive").start()
        with self._handle_signals():
            while any(self._iter_running_sessions()):
                for key, _ in self._selector.select(_TICK_S):
                    self._read(key.data, key.fileobj)  # type: ignore[arg-type]
                for session in list(self._iter_running_sessions()):
                    self._reap(session)
                self._try_lost_hosts()
                self._end_overdue()
        return self._make_launch_outcome()

    def _watch(self, session: SshSession) -> None:
        for stream in session.streams:
            self._selector.register(stream, selectors.EVENT_READ, session)

    def _iter_running_sessions(self) -> Iterator[SshSession]:
        return (s for s in list(self._sessions) if s.code is None)

    def _send_to_running(self, message: dict[str, Any]) -> None:
        for session in self._iter_running_sessions():
            session.send(message)

    def _send_keepalives(self) -> None:
        """Tell the hosts every two seconds that this process is alive."""
        while any(self._iter_running_sessions()):
            self._send_to_running({"alive": True})
            time.sleep(_ALIVE_INTERVAL_S)

    # --- output ---

    def _read(self, session: SshSession, stream: IO[bytes]) -> None:
        """Read what a host has printed and print whole lines of it."""
        data = os.read(stream.fileno(), 1 << 16)
        *lines, rest = (session.partial_lines[stream] + data).split(b"\n")
        if not data:
            self._selector.unregister(stream)
            lines, rest = ([rest] if rest else []), b""
        session.partial_lines[stream] = rest
        for line in lines:
            self._print_line(session, stream, line.decode(errors="replace"))

    def _print_line(self, session: SshSession, stream: IO[bytes], line: str) -> None:
        """Print a line after the name of its host, or handle the message in it."""
        text, message = split_message(line)
        if message is not None:
            self._handle_message(session, message)
            if not text:
                return
        if stream is session.process.stderr:
            session.last_stderr_lines.append(text)
        if not session.is_member:
            return
        screen = session.streams[stream]
        prefix = "" if session.is_here else f"{session.host:<{self._width}} │ "
        screen.write(f"{prefix}{text}".rstrip() + "\n")
        screen.flush()

    def _handle_message(self, session: SshSession, message: dict[str, Any]) -> None:
        """Handle a message of a node: the address of the leader, which nodes make up the world, or
        a failure."""
        if "meet" in message:
            self._meet = message
            for other in self._sessions:
                if other is not session:
                    other.send(message)
        elif "nodes" in message:
            self._take_members(NodeReport(*message["nodes"]))
        elif not session.is_member:
            return
        elif "failure" in message and (self._reported_failure is None or session.node == 0):
            self._reported_failure = Failure(**message["failure"])

    # --- hosts that are lost while the others go on ---

    def _take_members(self, report: NodeReport) -> None:
        """The leader has said which nodes go on. Of the others nothing is waited for; those that
        have left on purpose end by themselves. Hosts of such ones are tried again where more nodes
        are wanted."""
        self._deadline, self._failed, self._reported_failure = float("inf"), None, None
        for session in self._sessions:
            if session.node in report.nodes:
                session.is_member = True
            elif session.node in report.left_nodes:
                session.is_member = False
            elif session.is_member:
                session.is_member = False
                self._returns[session.host_index] = time.monotonic() + _RETURN_INTERVAL_S
                session.process.kill()

        hosts_in_use = {s.host_index for s in self._iter_members()}
        for host in range(self._host_count):
            waiting = set(self._returns) - hosts_in_use
            if len(waiting) < report.missing and host not in waiting | hosts_in_use:
                self._returns[host] = time.monotonic()

    def _try_lost_hosts(self) -> None:
        """Start an agent again on hosts that were lost, as a spare."""
        if self._meet is None or self._is_stopping or not any(self._iter_members()):
            return
        for host, due in list(self._returns.items()):
            is_busy = any(s.host_index == host for s in self._iter_running_sessions())
            if is_busy or time.monotonic() < due:
                continue
            self._returns[host] = time.monotonic() + _RETURN_INTERVAL_S
            session = self._start(host, self._next_node)
            self._next_node += 1
            session.is_return, session.is_member = True, False
            session.send(self._meet)
            self._sessions.append(session)
            self._watch(session)

    def _iter_members(self) -> Iterator[SshSession]:
        return (s for s in self._iter_running_sessions() if s.is_member)

    # --- how they end ---

    def _reap(self, session: SshSession) -> None:
        """Note the exit code of a session that has ended, once all its output was read."""
        open_streams = {key.fileobj for key in self._selector.get_map().values()}
        if open_streams & set(session.streams) or session.process.poll() is None:
            return
        session.code = session.process.returncode
        if session.code == ExitCode.LEFT:
            session.is_member = False
            self._returns.pop(session.host_index, None)  # nor is it taken back
        if not session.is_member:
            return  # the others go on without it
        if session.code in _SUCCESS_CODES:
            self._end_others_soon()
        elif self._failed is None:
            self._failed = session
            # Where it is lost, the others find out whether they can go on.
            lost_s = 3 * self._silence_s if session.is_lost or _is_isolated(session) else 0.0
            self._deadline = (
                time.monotonic() + lost_s + (_KILL_S if self._reported_failure else _GRACE_S)
            )

    def _end_others_soon(self) -> None:
        """Sessions that do not belong to the run any more must not outlast it."""
        if not any(self._iter_members()):
            self._deadline = min(self._deadline, time.monotonic())

    def _end_overdue(self) -> None:
        """End sessions that outlast a failure: first by a message to their watchdog, then by
        killing ssh."""
        if time.monotonic() < self._deadline:
            return
        self._deadline = time.monotonic() + _KILL_S
        self._kill_rounds += 1
        for session in self._iter_running_sessions():
            session.send({"kill": True}) if self._kill_rounds == 1 else session.process.kill()

    def _make_launch_outcome(self) -> SshLaunchOutcome:
        """Return the outcome, from what failed first."""
        if self._interrupts >= 2:
            words = "stopped at once; the last snapshot is intact"
            failure = Failure(0, self._sessions[0].host, None, words, "", int(ExitCode.INTERRUPTED))
            return SshLaunchOutcome(failure.exit, f"\n{words}", asdict(failure))
        finished = [s.code for s in self._sessions if s.code in _SUCCESS_CODES and s.is_member]
        if finished and (self._failed is None or self._failed.is_lost):
            # Nodes end well together, or not at all.
            return SshLaunchOutcome(max(finished), "", None)
        if self._reported_failure is not None:
            return SshLaunchOutcome(
                self._reported_failure.exit,
                f"\n{self._reported_failure}",
                asdict(self._reported_failure),
            )
        if self._failed is not None:
            failure = _make_silent_end_failure(self._failed)
            return SshLaunchOutcome(failure.exit, f"\nerror: {failure.summary}", asdict(failure))
        return SshLaunchOutcome(max(s.code or 0 for s in self._sessions), "", None)

    # --- signals ---

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Forward stop signals while in this context. Ctrl-Z is ignored: a halted process could not
        tell the hosts that it is alive."""
        before = {n: signal.signal(n, self._on_signal) for n in STOP_SIGNALS}
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward the first stop signal: the ranks agree, save and end. A second Ctrl-C does not
        wait."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            self._deadline = 0.0
        elif not self._is_stopping:
            self._is_stopping = True
            self._send_to_running({"signal": number})


def _is_isolated(session: SshSession) -> bool:
    """Return whether an agent ended since it had lost the others, which may go on without it."""
    return session.code == ExitCode.NODE_LOST


def _make_silent_end_failure(session: SshSession) -> Failure:
    """Return the failure of a node whose agent did not live to report one."""
    who = f"node {session.node} ({session.host})"
    error_lines = [line for line in session.last_stderr_lines if line.startswith("error: ")]
    if session.code == SSH_FAILED and not session.is_here:
        last_lines = join_last_lines("\n".join(session.last_stderr_lines))
        summary = f"the connection to {who} is lost: {last_lines}"
    elif session.is_lost:
        summary = f"{who} was killed"
    else:
        why = (
            error_lines[-1].removeprefix("error: ") if error_lines else f"exit code {session.code}"
        )
        summary = f"{who} failed: {why}"
    code = ExitCode.NODE_LOST if session.is_lost else session.code
    return Failure(0, session.host, None, summary, "", int(code or ExitCode.FAILED))
