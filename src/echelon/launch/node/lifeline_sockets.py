"""The connections under the lifelines: who is connected, and messages in both directions.

What the messages mean is a matter of `lifeline.py`; how they are proved to be ours, of
`message_channel.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from echelon.launch.node.message_channel import (
    ChannelClosed,
    ChannelListener,
    Message,
    MessageChannel,
    connect_channel,
    encode_message,
)

BEAT_INTERVAL_S = 1.0


class _Peer:
    """A node at the other end of a connection."""

    def __init__(self, channel: MessageChannel) -> None:
        self.channel = channel
        self.node = -1
        self.last_heard = time.monotonic()


class NodeServer:
    """The leader's end of all lifelines; on every other node it stands by. A thread reads from
    them and calls `on_message(node, message)` and `on_lost(node, how)`; `on_tick` every now and
    then."""

    def __init__(
        self,
        address: str,
        key: bytes,
        nodes: int,
        silence_s: float,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._listener = ChannelListener(address, key, nodes)
        self.port = self._listener.port
        self._silence_s = silence_s
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._connected: dict[MessageChannel, _Peer] = {}
        self._peers: dict[int, _Peer] = {}
        threading.Thread(target=self._serve, daemon=True, name="lifeline").start()

    @property
    def nodes(self) -> list[int]:
        """The nodes that are connected."""
        return list(self._peers)

    def send(self, node: int, message: Message) -> None:
        """Send a message to one node, if it is connected."""
        if (peer := self._peers.get(node)) is not None:
            peer.channel.send(message)

    def send_to_all(self, message: Message) -> None:
        """Send a message to every node."""
        body = encode_message(message)
        for peer in list(self._peers.values()):
            peer.channel.send_encoded(body)

    def drop(self, node: int) -> None:
        """Close the connection to a node."""
        if (peer := self._peers.get(node)) is not None:
            self._drop_peer(peer)

    def _serve(self) -> None:
        while True:
            for event in self._listener.poll(BEAT_INTERVAL_S / 4):
                peer = self._connected.setdefault(event.channel, _Peer(event.channel))
                self._handle_messages(peer, event.messages)
                if event.end:
                    self._lose_peer(peer, event.end)
            for peer in list(self._peers.values()):
                if time.monotonic() - peer.last_heard > self._silence_s:
                    self._lose_peer(peer, f"has sent nothing for {self._silence_s:g} s")
            self._on_tick()

    def _handle_messages(self, peer: _Peer, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._handle_message(peer, message)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose_peer(peer, "sent something that is not a message of ours")
                return

    def _handle_message(self, peer: _Peer, message: Message) -> None:
        """Handle one message of a node. The first one says which node it is."""
        peer.last_heard = time.monotonic()
        if peer.node < 0:
            node = int(message["node"])
            self.drop(node)  # it has connected again
            peer.node = node
            self._peers[node] = peer
        self._on_message(peer.node, message)
        if self._peers.get(peer.node) is peer:
            peer.channel.send({"alive": True})

    def _lose_peer(self, peer: _Peer, how: str) -> None:
        was_connected = self._peers.get(peer.node) is peer
        self._drop_peer(peer)
        if was_connected:
            self._on_lost(peer.node, how)

    def _drop_peer(self, peer: _Peer) -> None:
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
        self._connected.pop(peer.channel, None)
        self._listener.close_channel(peer.channel)


class LeaderConnection:
    """The connection of a node to the leader, or to one that may become it. One thread reads and
    calls `on_message(message)`, another sends `make_beat()` every second; either calls
    `on_lost(how)` once."""

    def __init__(
        self,
        address: str,
        key: bytes,
        timeout_s: float,
        silence_s: float,
        make_beat: Callable[[], Message],
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        host, _, port = address.rpartition(":")
        self._silence_s = silence_s
        self._make_beat, self._on_message, self._on_lost = make_beat, on_message, on_lost
        self._channel = connect_channel(host, int(port), key, timeout_s)
        self.own_address: str = self._channel.connection.getsockname()[0]
        """By which the leader could reach this node."""
        self._is_over = False
        self._lock = threading.Lock()
        self._last_heard = time.monotonic()

    def start(self, node: int, **introduction: Any) -> None:
        """Introduce this node, and begin to read."""
        self.send({"node": node, **introduction})
        for target in (self._read_messages, self._send_beats):
            threading.Thread(target=target, daemon=True, name="lifeline").start()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def close(self) -> None:
        """Close the connection, without a call of `on_lost`."""
        self.stop_watching()
        self._channel.close()

    def stop_watching(self) -> None:
        """Leave the connection open; whatever becomes of it is no matter any more."""
        with self._lock:
            self._is_over = True

    def _send_beats(self) -> None:
        while not self._is_over:
            self.send(self._make_beat())
            if time.monotonic() - self._last_heard > self._silence_s:
                self._lose(f"has sent nothing for {self._silence_s:g} s")
            time.sleep(BEAT_INTERVAL_S)

    def _read_messages(self) -> None:
        while not self._is_over:
            try:
                messages = self._channel.receive()
            except ChannelClosed as end:
                self._lose(str(end))
                return
            if messages:
                self._last_heard = time.monotonic()
            for message in messages:
                self._on_message(message)

    def _lose(self, how: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._on_lost(how)
