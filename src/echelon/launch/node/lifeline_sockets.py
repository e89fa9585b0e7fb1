"""The connections under the lifelines: who is connected, and messages in both directions.

What the messages mean is a matter of `lifeline.py`; how they are proved to be ours, of
`message_channel.py`; how many nodes form a tree, of `lifeline_relay.py`. One thread reads and sends
for all of them (`event_thread.py`), so nothing here waits for the network.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from echelon.errors import EchelonError
from echelon.launch.node.event_thread import get_event_thread
from echelon.launch.node.lifeline_relay import (
    FANOUT,
    RELAY_DELAY_S,
    RelayQueue,
    choose_moves,
    is_heartbeat,
)
from echelon.launch.node.message_channel import (
    ChannelEvent,
    ChannelListener,
    Message,
    MessageChannel,
    connect_channel,
    encode_message,
)

BEAT_INTERVAL_S = 1.0
_REJOIN_TIMEOUT_S = 5.0
"""For a node that listens already, or is lost as well."""


class _Peer:
    """A node at the other end of a connection."""

    def __init__(self, channel: MessageChannel) -> None:
        self.channel = channel
        self.node = -1
        self.address = ""
        """HOST:PORT at which it takes connections of others."""
        self.is_child = False
        """Whether the leader has sent it here; else it is one that would follow this node."""
        self.moves_to = -1
        """The node to which it was sent on, if it was."""
        self.has_moved = False
        """Whether it has said that nothing more comes from here."""
        self.can_move = True
        self.last_heard = time.monotonic()


class NodeServer:
    """An agent's end of the connections that others open to it: the leader's end of all lifelines,
    and a relay's end of those below it. On every other node it stands by.

    `on_message(node, message)` and `on_lost(node, how)` are called for nodes behind a relay too,
    `on_tick()` every now and then, and after losses at once.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        nodes: int,
        silence_s: float,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
        on_tick: Callable[[], None],
        fanout: int = FANOUT,
    ) -> None:
        self._listener = ChannelListener(address, key, nodes)
        self.port = self._listener.port
        self.is_root = False
        """Whether this node leads: nodes behind a lost relay may come back to it."""
        self._fanout = fanout if nodes > fanout else nodes
        self._silence_s = silence_s
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._connected: dict[MessageChannel, _Peer] = {}
        self._peers: dict[int, _Peer] = {}
        self._routes: dict[int, _Peer] = {}
        """Every node that can be reached → the peer over which it is."""
        self._orphans: dict[int, tuple[float, int]] = {}
        """Nodes behind a lost relay → until when they may come back, and the relay."""
        self._uplinks: dict[MessageChannel, LeaderConnection] = {}
        """This node's own connections to others, which are read here too."""
        self._uplink: LeaderConnection | None = None
        """To which messages of the children are passed on."""
        self._introduced: set[int] = set()
        """The nodes that have introduced themselves to this one while there is no leader. What a
        node has sent before that is in its introduction."""
        self._queue = RelayQueue()
        self._is_flush_due = False
        self._has_losses = False
        self._is_closed = False
        self._events = get_event_thread()
        self._events.watch(self._listener.fileno(), self._read)
        self._events.call_every(BEAT_INTERVAL_S / 4, self._tick)

    @property
    def nodes(self) -> list[int]:
        """The nodes that are connected, or may come back in time."""
        return [*self._routes, *self._orphans]

    @property
    def peer_count(self) -> int:
        """How many nodes have a connection to this one."""
        return len(self._peers)

    def send(self, node: int, message: Message) -> None:
        """Send a message to one node, if it is connected."""
        if (peer := self._routes.get(node)) is None:
            return
        is_direct = peer.node == node
        peer.channel.send(
            message if is_direct else {"tree": "to", "node": node, "message": message}
        )

    def send_to_all(self, message: Message) -> None:
        """Send a message to every node."""
        self.send_to_peers({"tree": "all", "message": message})

    def send_to_peers(self, message: Message) -> None:
        """Send a message to every node that has a connection to this one."""
        self._send_to_each(message, self._list_routed_peers())

    def send_to_children(self, message: Message) -> None:
        """Pass a message of the leader on to the nodes that hear it over this one. A node that
        would follow this one has heard it, or has left that leader: it must not hear it again."""
        self._send_to_each(message, [p for p in self._list_routed_peers() if p.is_child])

    def _list_routed_peers(self) -> list[_Peer]:
        return [p for n, p in list(self._peers.items()) if self._routes.get(n) is p]

    @staticmethod
    def _send_to_each(message: Message, peers: list[_Peer]) -> None:
        body = encode_message(message) if peers else b""
        for peer in peers:
            peer.channel.send_encoded(body)

    def drop(self, node: int) -> None:
        """Close the connection to a node."""
        self._orphans.pop(node, None)
        if (peer := self._routes.pop(node, None)) is None:
            return
        if peer.node == node:
            self._drop_peer(peer)
        else:
            peer.channel.send({"tree": "drop", "node": node})

    def drop_all(self) -> None:
        """Close the connections to all nodes, so that they look for others."""
        for peer in list(self._peers.values()):
            self._drop_peer(peer)

    def close(self) -> None:
        """Close all connections and take no more."""
        self._is_closed = True
        self._events.unwatch(self._listener.fileno(), self._listener.close)

    # --- a node that passes on what its children send ---

    def add_uplink(self, channel: MessageChannel, connection: LeaderConnection) -> None:
        """Read from a connection that this agent has opened."""
        channel.buffer_sending(self._events.call_later)
        self._uplinks[channel] = connection
        self._listener.add_channel(channel)

    def has_uplink(self, channel: MessageChannel) -> bool:
        return channel in self._uplinks

    def close_uplink(self, channel: MessageChannel) -> None:
        self._uplinks.pop(channel, None)
        self._listener.close_channel(channel)

    def attach(self, connection: LeaderConnection) -> None:
        """Pass on what the children send, who introduce themselves again. What they had sent to
        another leader is in their introductions."""
        if self._uplink is not connection:
            self._queue.clear()
        self._uplink = connection
        self.send_to_peers({"tree": "introduce"})

    def detach(self, connection: LeaderConnection) -> None:
        """Pass on nothing over this connection any more."""
        if self._uplink is connection:
            self._uplink = None
            self._introduced.clear()
            self._queue.clear()

    def ask_for_introductions(self) -> None:
        """Have the nodes below introduce themselves to this one, which is to lead."""
        self.send_to_peers({"tree": "introduce"})

    def flush(self, node: int, beat: Message) -> bool:
        """Send up what is to be passed on, and a heartbeat of this node with it; returns False if
        there are no nodes below, and nothing was sent."""
        if not self._routes or self._uplink is None:
            return False
        self._queue.put(node, beat)
        self._send_queue()
        return True

    def _relay(self, node: int, message: Message) -> None:
        self._queue.put(node, message)
        if not is_heartbeat(message) and not self._is_flush_due:
            self._is_flush_due = True
            self._events.call_later(RELAY_DELAY_S, self._send_queue)

    def _send_queue(self) -> None:
        self._is_flush_due = False
        if (uplink := self._uplink) is not None:
            for message in self._queue.take():
                uplink.send(message)

    # --- what arrives ---

    def _read(self) -> None:
        if self._is_closed:
            return
        for event in self._listener.poll(0):
            if (uplink := self._uplinks.get(event.channel)) is not None:
                uplink.take_event(event)
                continue
            peer = self._connected.get(event.channel)
            if peer is None:
                event.channel.buffer_sending(self._events.call_later)
                peer = self._connected[event.channel] = _Peer(event.channel)
            self._handle_messages(peer, event.messages)
            if event.end:
                self._lose_peer(peer, event.end)
        self._announce_losses()

    def _tick(self) -> bool:
        if self._is_closed:
            return False
        now = time.monotonic()
        self._listener.refuse_slow_strangers()
        for peer in list(self._peers.values()):
            if now - peer.last_heard > self._silence_s:
                self._lose_peer(peer, f"has sent nothing for {self._silence_s:g} s")
        for node, (deadline, relay) in list(self._orphans.items()):
            if now > deadline:
                del self._orphans[node]
                self._on_lost(node, f"is gone since node {relay} is, which was its way here")
        if len(self._peers) > self._fanout and (self.is_root or self._uplink is not None):
            self._spread_children()
        self._on_tick()
        return True

    def _announce_losses(self) -> None:
        """Those of one moment are announced together."""
        if self._has_losses:
            self._has_losses = False
            self._on_tick()

    def _spread_children(self) -> None:
        """Send some children on to others, where there are too many."""
        sizes = Counter(peer.node for peer in self._routes.values())
        sizes.update(p.moves_to for n, p in self._peers.items() if self._routes.get(n) is p)
        children = {n: p for n, p in self._peers.items() if sizes[n] and p.moves_to < 0}
        movable = [n for n, peer in children.items() if peer.can_move]
        moves = choose_moves({n: sizes[n] for n in children}, movable, self._fanout)
        for node, parent in moves.items():
            children[node].moves_to = parent
            address = children[parent].address
            children[node].channel.send({"tree": "redirect", "address": address})

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
            self._admit(peer, message)
        kind = message.get("tree")
        if kind is None:
            self._take(peer, peer.node, message)
        elif kind == "relayed":
            for node, relayed in message["items"]:
                self._take(peer, int(node), relayed)
        elif kind == "stay":
            peer.moves_to, peer.can_move = -1, False
        elif kind == "moved":
            peer.has_moved = True
            self._drop_if_moved(peer)
        if self._peers.get(peer.node) is peer:
            peer.channel.send({"alive": True})

    def _admit(self, peer: _Peer, message: Message) -> None:
        node = int(message["node"])
        if (before := self._peers.get(node)) is not None:
            self._drop_peer(before)  # it has connected again
        peer.node, peer.is_child = node, bool(message.get("child"))
        peer.address = str(message["member"]["lifeline"])
        self._peers[node] = peer

    def _take(self, peer: _Peer, node: int, message: Message) -> None:
        """Take a message of a node that has come over this peer: handle it or pass it on."""
        if message.get("tree") == "gone":
            if self._routes.get(node) is peer:
                behind = [n for n in message["behind"] if self._routes.get(n) is peer]
                self._lose_nodes(peer, node, str(message["how"]), behind)
            return
        is_relayed = self._uplink is not None and peer.is_child
        is_unknown = node not in self._routes
        if "node" in message or (is_unknown and (is_relayed or node in self._orphans)):
            self._set_route(node, peer)
        elif is_unknown:
            return
        if is_relayed:
            self._relay(node, message)
            return
        if "node" in message:
            self._introduced.add(node)
        if self.is_root or node in self._introduced:
            self._on_message(node, message)

    def _set_route(self, node: int, peer: _Peer) -> None:
        own = self._peers.get(node)
        if own is not None and own is not peer and own.moves_to < 0:
            return  # it is connected here
        self._routes[node] = peer
        self._orphans.pop(node, None)
        if own is not None:
            self._drop_if_moved(own)

    def _drop_if_moved(self, peer: _Peer) -> None:
        """Close the connection of a node that has gone on to another one, once it is known there
        and all that it had sent here has come."""
        if peer.has_moved and self._routes.get(peer.node) is not peer:
            self._drop_peer(peer)

    # --- losses ---

    def _lose_peer(self, peer: _Peer, how: str) -> None:
        was_connected = self._routes.get(peer.node) is peer
        behind = [n for n, p in self._routes.items() if p is peer and n != peer.node]
        if was_connected:
            self._lose_nodes(peer, peer.node, how, behind)
        self._drop_peer(peer)

    def _lose_nodes(self, peer: _Peer, node: int, how: str, behind: list[int]) -> None:
        """A node is lost, and with it the way to those behind it, who know another one: they come
        back to the leader."""
        for each in (node, *behind):
            self._routes.pop(each, None)
        if self._uplink is not None and peer.is_child:
            self._relay(node, {"tree": "gone", "how": how, "behind": behind})
            return
        self._has_losses = True
        if self.is_root:
            self._await_orphans(behind, node)
            self._on_lost(node, how)
        else:  # they had promised to follow this node
            for each in (node, *behind):
                self._on_lost(each, how)

    def _await_orphans(self, nodes: list[int], relay: int) -> None:
        """Nodes whose relay is gone are as silent as one that sends nothing."""
        deadline = time.monotonic() + self._silence_s
        self._orphans.update(dict.fromkeys(nodes, (deadline, relay)))

    def _drop_peer(self, peer: _Peer) -> None:
        behind = [n for n, p in self._routes.items() if p is peer]
        for node in behind:
            del self._routes[node]
        if self.is_root:
            self._await_orphans([n for n in behind if n != peer.node], peer.node)
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
        self._connected.pop(peer.channel, None)
        self._listener.close_channel(peer.channel)


class LeaderConnection:
    """The connection of a node to the leader, or to one that may become it; perhaps over a parent
    that passes on what it sends.

    A thread reads and calls `on_message(message)`, and sends `make_beat()` every second. It calls
    `on_lost(how)` once if the leader is lost; `on_waiting(how)` if the parent has said so, which
    looks for another leader itself. Where only the parent is lost, it connects to the address that
    `find_leader()` returns; "" means that there is no leader.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        timeout_s: float,
        silence_s: float,
        make_beat: Callable[[], Message],
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        on_waiting: Callable[[str], None],
        find_leader: Callable[[], str],
    ) -> None:
        self._address, self._key = address, key
        self._silence_s = silence_s
        self._make_beat, self._on_message = make_beat, on_message
        self._on_lost, self._on_waiting, self._find_leader = on_lost, on_waiting, find_leader
        self._channel = _connect(address, key, timeout_s)
        self.own_address: str = self._channel.connection.getsockname()[0]
        """By which the leader could reach this node."""
        self.parent = ""
        """HOST:PORT of the node over which the leader is reached; "" if directly."""
        self._server: NodeServer | None = None
        self._node = -1
        self._make_introduction: Callable[[], Message] = dict
        self._is_over = False
        self._is_rejoining = False
        self._old_channels: dict[MessageChannel, float] = {}
        """Connections before this one that are still read → since when."""
        self._held_events: list[ChannelEvent] = []
        """What has come over the new one meanwhile."""
        self._lock = threading.RLock()
        self._last_heard = time.monotonic()

    def start(
        self, server: NodeServer, node: int, make_introduction: Callable[[], Message]
    ) -> None:
        """Introduce this node, and begin to read. `server` is where its children connect."""
        self._server, self._node, self._make_introduction = server, node, make_introduction
        self._use(self._channel, "")
        get_event_thread().call_every(BEAT_INTERVAL_S, self._beat)

    def send(self, message: Message) -> None:
        with self._lock:  # not between an introduction and the change to its connection
            self._channel.send(message)

    def close(self) -> None:
        """Close the connection, without a call of `on_lost`."""
        self.stop_watching()
        if self._server is None:
            self._channel.close()
        else:
            self._server.detach(self)
            self._server.close_uplink(self._channel)

    def stop_watching(self) -> None:
        """Leave the connection open; whatever becomes of it is no matter any more."""
        with self._lock:
            self._is_over = True

    def take_event(self, event: ChannelEvent) -> None:
        """Handle what has come: first what was sent over the connection before."""
        assert self._server is not None
        if event.end:
            self._server.close_uplink(event.channel)
        if event.channel in self._old_channels:
            self._handle_event(event)
            if event.end:
                self._forget_old_channel(event.channel)
            return
        self._last_heard = time.monotonic()
        if self._old_channels:
            self._held_events.append(event)
        else:
            self._handle_event(event)

    def _handle_event(self, event: ChannelEvent) -> None:
        assert self._server is not None
        for message in event.messages if not self._is_over else ():
            self._handle_message(self._server, message)
        if event.end and event.channel is self._channel:
            self._lose_channel(event.end)

    def _forget_old_channel(self, channel: MessageChannel) -> None:
        self._old_channels.pop(channel, None)
        held, self._held_events = self._held_events, []
        for event in held:
            self.take_event(event)

    def _beat(self) -> bool:
        if self._is_over or self._server is None:
            return False
        beat = self._make_beat()
        if not self._server.flush(self._node, beat):
            self.send(beat)
        now = time.monotonic()
        for channel, since in list(self._old_channels.items()):
            if now - since > self._silence_s:
                self._server.close_uplink(channel)
                self._forget_old_channel(channel)
        if now - self._last_heard > self._silence_s:
            self._lose_channel(f"has sent nothing for {self._silence_s:g} s")
        return True

    def _handle_message(self, server: NodeServer, message: Message) -> None:
        kind = message.get("tree")
        if kind is None:
            self._on_message(message)
        elif kind == "all":
            server.send_to_children(message)
            self._on_message(message["message"])
        elif kind == "to":
            server.send(int(message["node"]), message["message"])
        elif kind == "drop":
            server.drop(int(message["node"]))
        elif kind == "introduce":
            with self._lock:
                self._channel.send(self._introduce())
            server.attach(self)
        elif kind == "leader_lost":
            server.send_to_children(message)
            self._on_waiting(str(message["how"]))
        elif kind == "redirect":
            channel, address = self._channel, str(message["address"])
            _start_thread(lambda: self._move(channel, address))

    # --- over which connection ---

    def _introduce(self) -> Message:
        kind = {"child": True} if self.parent else {}
        return {"node": self._node, **kind, **self._make_introduction()}

    def _use(self, channel: MessageChannel, parent: str) -> None:
        """Send over this connection from now on. The one before is read until its other end closes
        it, so nothing that was on its way is left out."""
        assert self._server is not None
        with self._lock:
            before, self._channel, self.parent = self._channel, channel, parent
            self._last_heard = time.monotonic()
            self._server.add_uplink(channel, self)
            channel.send(self._introduce())
            if self._server.has_uplink(before) and before is not channel:
                self._old_channels[before] = time.monotonic()
                before.send({"tree": "moved"})
        self._server.attach(self)

    def _move(self, before: MessageChannel, address: str) -> None:
        """Go on over another node, if it can be reached."""
        try:
            channel = _connect(address, self._key, _REJOIN_TIMEOUT_S, must_listen=True)
        except EchelonError:
            before.send({"tree": "stay"})
            return
        with self._lock:
            is_old = self._is_over or self._is_rejoining or self._channel is not before
            if not is_old:
                self._use(channel, address)
        if is_old:
            channel.close()

    def _rejoin(self, address: str, how: str) -> None:
        """Come back to the leader, since the parent is lost."""
        try:
            channel = _connect(address, self._key, _REJOIN_TIMEOUT_S, must_listen=True)
        except EchelonError:
            self._lose(f"cannot be reached, and the node on the way to it {how}")
            return
        with self._lock:
            self._is_rejoining = False
            if not self._is_over:
                self._use(channel, "")
                return
        channel.close()

    def _lose_channel(self, how: str) -> None:
        """The connection in use has ended: that to the leader, or to a parent."""
        if self._is_over or self._is_rejoining:
            return
        address = self._find_leader() if self.parent else ""
        if not address:
            self._lose(how)
            return
        self._is_rejoining = True
        assert self._server is not None
        self._server.close_uplink(self._channel)
        _start_thread(lambda: self._rejoin(address, how))

    def _lose(self, how: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            assert self._server is not None
            self._server.detach(self)
            self._server.close_uplink(self._channel)
            self._server.send_to_children({"tree": "leader_lost", "how": how})
            self._on_lost(how)


def _connect(
    address: str, key: bytes, timeout_s: float, must_listen: bool = False
) -> MessageChannel:
    host, _, port = address.rpartition(":")
    return connect_channel(host, int(port), key, timeout_s, must_listen)


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True, name="lifeline").start()
