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

from echelon.launch.ssh.tether import MARK
from echelon.utils.processes import die_with_parent

_LAST_LINES = 20
_FAILED_S = 3.0


class Command(NamedTuple):
    """One program that is the station of one node, or of many."""

    words: Sequence[str]
    nodes: Sequence[int]
    first: bytes = b""
    """What it reads before the orders."""


class Gone(NamedTuple):
    """A command that ended early."""

    code: int
    said: str


class Line:
    """A command that runs."""

    def __init__(self, command: Command, said: queue.SimpleQueue[dict[str, Any]]) -> None:
        self.nodes = list(command.nodes)
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._said = said
        self.process = subprocess.Popen(
            command.words,
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
        self.write(command.first)

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; who waits for an answer notices
            self.process.stdin.write(data)

    def _read(self, stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            text, _, message = line.decode(errors="replace").rstrip("\n").partition(MARK)
            if message:
                with contextlib.suppress(ValueError):
                    self._said.put(json.loads(message))
            elif text.strip():
                self._last.append(text)

    def gone(self) -> Gone | None:
        code = self.process.poll()
        if code is None:
            return None
        for reader in self._readers:
            reader.join(1)
        return Gone(code, "\n".join(self._last))

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self) -> None:
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


class Conductor:
    def __init__(self, commands: Iterable[Command]) -> None:
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines = [Line(command, self._said) for command in commands]
        self._orders = 0
        self._here: set[int] = set()

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines:  # all before one is waited for
            line.hang_up()
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.end)

    def gather(self, limit_s: float) -> dict[int, Gone | None]:
        """Until every node is here, or cannot come: those that are not, and how they ended."""
        deadline = time.monotonic() + limit_s
        while missing := [n for line in self._lines for n in line.nodes if n not in self._here]:
            message = self._next(deadline)
            if message and "hello" in message:
                self._here.add(message["node"])
            ended = [line for line in self._lines if line.gone()]
            lost = {n for line in ended for n in line.nodes} | self._here
            if time.monotonic() > deadline or (set(missing) <= lost and self._said.empty()):
                break
        return {n: o.gone() for o in self._lines for n in o.nodes if n not in self._here}

    def ask(
        self, orders: dict[int, dict[str, Any]], do: str, limit_s: float, together: bool = False
    ) -> dict[int, dict[str, Any]]:
        """All at once, each node its own; what comes in time. Where they act together, nobody is
        waited for long once one has failed."""
        waited: dict[int, int] = {}
        for node, details in orders.items():
            self._orders += 1
            waited[self._orders] = node
            order = {"to": [node], "id": self._orders, "do": do, "with": details}
            line = next(line for line in self._lines if node in line.nodes)
            line.write(json.dumps(order).encode() + b"\n")
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(waited) and time.monotonic() < deadline:
            message = self._next(deadline)
            if message and message.get("id") in waited:
                answers[message["node"]] = answer = message["answer"]
                if together and (answer.get("trouble") or answer.get("failed")):
                    deadline = min(deadline, time.monotonic() + _FAILED_S)
            alive = {n for line in self._lines if not line.gone() for n in line.nodes}
            if not (set(waited.values()) - answers.keys()) & alive and self._said.empty():
                break
        return answers

    def _next(self, deadline: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=max(0.0, min(0.25, deadline - time.monotonic())))
        return None
