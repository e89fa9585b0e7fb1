"""The near end of a preflight: a station on every node, orders to them, and what they answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

from echelon.hosts.messages import split_message
from echelon.utils.processes import die_with_parent

_LAST_LINES = 20
_GRACE_AFTER_FAILURE_S = 3.0


class ProbeCommand(NamedTuple):
    """One program that is the station of one node, or of many."""

    argv: Sequence[str]
    nodes: Sequence[int]
    first_input: bytes = b""
    """What it reads before the orders."""


class ProbeExit(NamedTuple):
    """A command that ended early."""

    code: int
    output: str


class ProbeConnection:
    """A command that runs."""

    def __init__(self, command: ProbeCommand, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
        self.nodes = list(command.nodes)
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._said = messages
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()
        self.write(command.first_input)

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; who waits for an answer notices
            self.process.stdin.write(data)

    def _read(self, stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            text, message = split_message(line.decode(errors="replace").rstrip("\n"))
            if message is not None:
                self._said.put(message)
            elif text.strip():
                self._last.append(text)

    def get_exit(self) -> ProbeExit | None:
        code = self.process.poll()
        if code is None:
            return None
        for reader in self._readers:
            reader.join(1)
        return ProbeExit(code, "\n".join(self._last))

    def close_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait_or_kill(self) -> None:
        """After hanging up; what does not listen is killed."""
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # srun ends its step by this, and its job
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class ProbeGroup:
    def __init__(self, commands: Iterable[ProbeCommand]) -> None:
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines = [ProbeConnection(command, self._said) for command in commands]
        self._orders = 0
        self._here: set[int] = set()

    def __enter__(self) -> ProbeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:  # all before one is waited for
            line.close_input()
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.wait_or_kill)

    def wait_for_nodes(self, timeout_s: float) -> dict[int, ProbeExit | None]:
        """Until every node is here, or cannot come: those that are not, and how they ended."""
        deadline = time.monotonic() + timeout_s
        while missing := [n for line in self._lines for n in line.nodes if n not in self._here]:
            message = self._next_message(deadline)
            if message and "hello" in message:
                self._here.add(message["node"])
            ended = [line for line in self._lines if line.get_exit()]
            lost = {n for line in ended for n in line.nodes} | self._here
            if time.monotonic() > deadline or (set(missing) <= lost and self._said.empty()):
                break
        return {n: o.get_exit() for o in self._lines for n in o.nodes if n not in self._here}

    def ask_nodes(
        self,
        orders: dict[int, dict[str, Any]],
        action: str,
        timeout_s: float,
        is_collective: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """All at once, each node its own; what comes in time. Where they act together, nobody is
        waited for long once one has failed."""
        waited: dict[int, int] = {}
        for node, details in orders.items():
            self._orders += 1
            waited[self._orders] = node
            order = {"to": [node], "id": self._orders, "do": action, "with": details}
            line = next(line for line in self._lines if node in line.nodes)
            line.write(json.dumps(order).encode() + b"\n")
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(waited) and time.monotonic() < deadline:
            message = self._next_message(deadline)
            if message and message.get("id") in waited:
                answers[message["node"]] = answer = message["answer"]
                if is_collective and (answer.get("trouble") or answer.get("failed")):
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
            alive = {n for line in self._lines if not line.get_exit() for n in line.nodes}
            if not (set(waited.values()) - answers.keys()) & alive and self._said.empty():
                break
        return answers

    def _next_message(self, deadline: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=max(0.0, min(0.25, deadline - time.monotonic())))
        return None
