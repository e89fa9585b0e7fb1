"""The sockets under the lifelines: who is connected, and lines of JSON in both directions.

What the messages mean is a matter of `lifeline.py`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
BEAT_INTERVAL_S = 1.0
_SEND_LOCK = threading.Lock()


class _Peer:
    """A node at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.node = -1
        self.partial_line = b""
        self.last_heard = time.monotonic()


class NodeServer:
    """The leader's end of all lifelines; on every other node it stands by. A thread reads from
    them and calls `on_message(node, message)` and `on_lost(node, how)`; `on_tick` every now and
    then."""

    def __init__(
        self,
        address: str,
        secret: str,
        silence_s: float,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
        on_tick: Callable[[], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._silence_s = secret, silence_s
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True, name="lifeline").start()

    @property
    def nodes(self) -> list[int]:
        """The nodes that are connected."""
        return list(self._peers)

    def send(self, node: int, message: Message) -> None:
        """Send a message to one node, if it is connected."""
        if (peer := self._peers.get(node)) is not None:
            _send_line(peer.connection, message)

    def send_to_all(self, message: Message) -> None:
        """Send a message to every node."""
        for peer in list(self._peers.values()):
            _send_line(peer.connection, message)

    def drop(self, node: int) -> None:
        """Close the connection to a node."""
        if (peer := self._peers.get(node)) is not None:
            self._drop_peer(peer)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=BEAT_INTERVAL_S / 4):
                if key.data is None:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
                else:
                    self._read_from_peer(key.data)
            for peer in list(self._peers.values()):
                if time.monotonic() - peer.last_heard > self._silence_s:
                    self._lose_peer(peer, f"has sent nothing for {self._silence_s:g} s")
            self._on_tick()

    def _read_from_peer(self, peer: _Peer) -> None:
        """Read what a node has sent, line by line."""
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose_peer(peer, "closed its connection")
            return
        *lines, peer.partial_line = (peer.partial_line + data).split(b"\n")
        for line in lines:
            try:
                self._handle_line(peer, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose_peer(peer, "sent something that is not a message of ours")
                return

    def _handle_line(self, peer: _Peer, message: Message) -> None:
        """Handle one message of a node. The first one must have the key."""
        peer.last_heard = time.monotonic()
        if peer.node < 0:
            if message.get("key") != self._secret:
                self._drop_peer(peer)  # not one of our nodes
                return
            peer.node = message["node"]
            self.drop(peer.node)  # it has connected again
            self._peers[peer.node] = peer
        self._on_message(peer.node, message)
        if peer.node in self._peers:
            _send_line(peer.connection, {"alive": True})

    def _lose_peer(self, peer: _Peer, how: str) -> None:
        was_connected = self._peers.get(peer.node) is peer
        self._drop_peer(peer)
        if was_connected:
            self._on_lost(peer.node, how)

    def _drop_peer(self, peer: _Peer) -> None:
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()


class LeaderConnection:
    """The connection of a node to the leader, or to one that may become it. One thread reads and
    calls `on_message(message)`, another sends `make_beat()` every second; either calls
    `on_lost(how)` once."""

    def __init__(
        self,
        address: str,
        hello: Message,
        silence_s: float,
        make_beat: Callable[[], Message],
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        host, _, port = address.rpartition(":")
        self._silence_s = silence_s
        self._make_beat, self._on_message, self._on_lost = make_beat, on_message, on_lost
        self._connection = socket.create_connection((host, int(port)), timeout=silence_s)
        self._connection.settimeout(BEAT_INTERVAL_S)
        self.own_address: str = self._connection.getsockname()[0]
        self._hello = hello
        self._is_over = False
        self._lock = threading.Lock()

    def start(self, **more: Any) -> None:
        """Introduce this node, and begin to read."""
        self.send(self._hello | more)
        self._last_heard = time.monotonic()
        for target in (self._read_messages, self._send_beats):
            threading.Thread(target=target, daemon=True, name="lifeline").start()

    def send(self, message: Message) -> None:
        _send_line(self._connection, message)

    def close(self) -> None:
        """Close the connection, without a call of `on_lost`."""
        with self._lock:
            self._is_over = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def stop_listening(self) -> None:
        """Leave the connection open, but take its end for the end of all."""
        with self._lock:
            self._is_over = True

    def _send_beats(self) -> None:
        while not self._is_over:
            self.send(self._make_beat())
            if time.monotonic() - self._last_heard > self._silence_s:
                self._lose(f"has sent nothing for {self._silence_s:g} s")
            time.sleep(BEAT_INTERVAL_S)

    def _read_messages(self) -> None:
        text = b""
        while not self._is_over:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                self._lose("closed its connection")
                return
            self._last_heard = time.monotonic()
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._on_message(json.loads(line))

    def _lose(self, how: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._on_lost(how)


def _send_line(connection: socket.socket, message: Message) -> None:
    """Send one message as a whole line, from any thread. If that fails the connection is closed,
    and whoever reads from it notices."""
    line = json.dumps(message).encode() + b"\n"
    with _SEND_LOCK:
        try:
            connection.sendall(line)
        except OSError:  # whoever reads from it notices
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
