"""Somebody on the network of a job, without its key, who does all that he can to the job."""

from __future__ import annotations

import contextlib
import json
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from echelon.runs.failure import Failure

_BLOCK_BYTES = 4 << 20
_WATCHED_NAME = "echelon/0.1/failure"
_FAILURE = Failure(1, "elsewhere", 3, "forged by a stranger", "")


class NetworkStranger:
    """Knows where node 0 is, and what Echelon's code does."""

    def __init__(self, host: str, store_port: int) -> None:
        self._host = host
        self._store: Any = dist.TCPStore(
            host, store_port, None, False, timedelta(seconds=60), False
        )
        # The lifeline's port is no secret, nor could it be.
        self._lifeline_port = int(self._store.get("lifeline"))

    def do_everything(self) -> None:
        """Attack once in every way. Returns when all was sent."""
        self.write_into_store()
        self.speak_to_agent()
        self.send_much()
        self.hold_connections(1000)

    def read_everything(self) -> list[bytes]:
        """Return all values that are in the store."""
        return [self._store.get(name) for name in self._store.list_keys()]

    def fill_value(self, size: int) -> None:
        """Make a value as large as this at which ranks look when one of them is lost."""
        for _ in range(0, size, _BLOCK_BYTES):
            self._store.append(_WATCHED_NAME, "x" * _BLOCK_BYTES)
        self._store.check([_WATCHED_NAME])  # all has arrived

    def is_filled(self) -> bool:
        """Return whether that value is still there."""
        return bool(self._store.check([_WATCHED_NAME]))

    def write_into_store(self) -> None:
        """Report failures, offer replacements, count members that are not there, and join as a
        node."""
        forged = {
            "echelon/0/failure": _FAILURE.to_json(),
            "echelon/0.1/failure": _FAILURE.to_json(),
            "echelon/1/failure": _FAILURE.to_json(),
            "rounds/0/transient/1": _FAILURE.to_json(),
            "rounds/0/replacement/1/1": "1",
            "echelon/0/ranks end": "1",
            "echelon/0/left the loop": json.dumps({"rank": 1, "step": 1, "messages": 0}),
            "echelon/0/left the loop/1": json.dumps({"rank": 1, "step": 1, "messages": 0}),
            "echelon/0/calls of rank 0": json.dumps([[1, "stop", 1]]),
            "nodes/1/complete": "1",
        }
        for key, value in forged.items():
            self._store.set(key, value)
        for counter in ("echelon/0/nodes done", "rounds/0/ended in 0", "nodes/0/1", "nodes/0/2"):
            with contextlib.suppress(RuntimeError):  # what is there may not be a number
                self._store.add(counter, 5)

    def speak_to_agent(self) -> None:
        """Say to node 0's agent what another agent would."""
        messages = [
            {"node": 1, "host": "elsewhere"},
            {"failure": json.loads(_FAILURE.to_json()), "attempt": 0},
            {"lost": [1], "cause": json.loads(_FAILURE.to_json()), "attempt": 0},
            {"bye": True},
        ]
        lines = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        for sent in (lines, b"0" * 64 + b" " + b"0" * 64 + b"\n" + lines, b"\0" * 200, b"\n"):
            with contextlib.suppress(OSError), self._connect() as connection:
                connection.sendall(sent)
                while connection.recv(4096):
                    pass

    def send_much(self) -> None:
        """Send a hundred megabytes without the end of a line."""
        block = b"x" * (1 << 20)
        with contextlib.suppress(OSError), self._connect() as connection:
            for _ in range(100):
                connection.sendall(block)

    def hold_connections(self, count: int) -> None:
        """Open connections and say nothing, in all of them at once."""
        with contextlib.ExitStack() as held:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    held.enter_context(self._connect())

    def _connect(self) -> socket.socket:
        return socket.create_connection((self._host, self._lifeline_port), timeout=30)
