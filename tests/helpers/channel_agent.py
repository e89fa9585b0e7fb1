"""An agent that answers whoever has its key, and what strangers use to talk to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from echelon.launch.node.message_channel import ChannelListener, Message, MessageChannel

LIMIT_S = 300.0
KEY = b"the key of this job"


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


class Agent:
    """An agent that answers every message with the same, and keeps what came and what ended."""

    def __init__(self) -> None:
        self.listener = ChannelListener("127.0.0.1", KEY, 2)
        self.port = self.listener.port
        self.came: list[Message] = []
        self.ended: list[str] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over:
            for event in self.listener.poll(0.05):
                self.came += event.messages
                for message in event.messages:
                    event.channel.send(message)
                if event.end:
                    self.ended.append(event.end)

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


def ask(channel: MessageChannel, message: Message) -> list[Message]:
    """Send a message and return the answer."""
    channel.send(message)
    return cast(list[Message], until(channel.receive))


def connect(agent: Agent) -> socket.socket:
    """Connect as a stranger."""
    return socket.create_connection(("127.0.0.1", agent.port), timeout=LIMIT_S)


def read_to_the_end(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


class Recorder:
    """A stranger between two agents, who keeps all bytes and may change them on the way."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.sent = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target, self._change = port, change
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
        with suppress(OSError):
            while data := near.recv(1 << 16):
                self.sent += data
                far.sendall(self._change(data))
        far.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
