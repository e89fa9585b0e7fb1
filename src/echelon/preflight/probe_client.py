"""The near end of a preflight: starts the node probes, sends orders and collects answers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import IO, Any

from echelon.hosts.message_protocol import split_message
from echelon.launch.plan import ProbeCommand, ProbeExit
from echelon.utils.processes import die_with_parent

_LAST_LINES = 20
_GRACE_AFTER_FAILURE_S = 3.0
_POLL_S = 0.25


class ProbeConnection:
    """A running command: orders go to its standard input, messages come from its output."""

    def __init__(self, command: ProbeCommand, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
        self.nodes = list(command.nodes)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._messages = messages
        self.process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to this process alone, which closes the input
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
        """Send bytes; that the command has ended is noticed by whoever waits for an answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(data)

    def _read(self, stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            text, message = split_message(line.decode(errors="replace").rstrip("\n"))
            if message is not None:
                self._messages.put(message)
            elif text.strip():
                self._last_lines.append(text)

    def get_exit(self) -> ProbeExit | None:
        """Return how the command ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        for reader in self._readers:
            reader.join(1)
        return ProbeExit(code, "\n".join(self._last_lines))

    def close_input(self) -> None:
        """Close the standard input, at which a probe ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait_or_kill(self) -> None:
        """Wait for the end after ``close_input``; a command that does not end is killed."""
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # on SIGTERM srun ends its step and its job
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class ProbeGroup:
    """The probes of all nodes. A context manager: at its end the probes are ended."""

    def __init__(self, commands: Iterable[ProbeCommand]) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._connections = [ProbeConnection(command, self._messages) for command in commands]
        self._order_count = 0
        self._ready_nodes: set[int] = set()

    def __enter__(self) -> ProbeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:  # ask all to end before waiting for one
            connection.close_input()
        with contextlib.ExitStack() as stack:
            for connection in self._connections:
                stack.callback(connection.wait_or_kill)

    def wait_for_nodes(self, timeout_s: float) -> dict[int, ProbeExit | None]:
        """Wait until every node has said hello or cannot any more.

        Returns the nodes that have not, with how their command ended, or None if it still runs.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._list_missing_nodes():
            message = self._get_next_message(deadline)
            if message and "hello" in message:
                self._ready_nodes.add(message["node"])
            ended = [c for c in self._connections if c.get_exit()]
            settled = {node for c in ended for node in c.nodes} | self._ready_nodes
            if time.monotonic() > deadline or (set(missing) <= settled and self._messages.empty()):
                break
        missing = self._list_missing_nodes()
        return {n: c.get_exit() for c in self._connections for n in c.nodes if n in missing}

    def _list_missing_nodes(self) -> list[int]:
        return [n for c in self._connections for n in c.nodes if n not in self._ready_nodes]

    def ask_nodes(
        self,
        orders: dict[int, dict[str, Any]],
        action: str,
        timeout_s: float,
        is_collective: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """Let each node call ``action`` of its probe with its own arguments, all at the same time.

        Returns the answers that came in time. In a collective action the others cannot finish once
        one has failed, so they are waited for only shortly.
        """
        node_of_order: dict[int, int] = {}
        for node, arguments in orders.items():
            self._order_count += 1
            node_of_order[self._order_count] = node
            order = {"to": [node], "id": self._order_count, "do": action, "with": arguments}
            connection = next(c for c in self._connections if node in c.nodes)
            connection.write(json.dumps(order).encode() + b"\n")
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(node_of_order) and time.monotonic() < deadline:
            message = self._get_next_message(deadline)
            if message and message.get("id") in node_of_order:
                answers[message["node"]] = answer = message["answer"]
                if is_collective and (answer.get("trouble") or answer.get("failed")):
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
            alive = {node for c in self._connections if not c.get_exit() for node in c.nodes}
            waited_for = set(node_of_order.values()) - answers.keys()
            if not waited_for & alive and self._messages.empty():
                break
        return answers

    def _get_next_message(self, deadline: float) -> dict[str, Any] | None:
        """Return a message, or None after a short time, so that ended commands are noticed."""
        with contextlib.suppress(queue.Empty):
            remaining_s = deadline - time.monotonic()
            return self._messages.get(timeout=max(0.0, min(_POLL_S, remaining_s)))
        return None
