"""The agents of several nodes hold one connection each to node 0's: who dies, is cut off or
hangs is noticed and named there, and everyone hears of it at once.

Lines of JSON, nothing else. torch's store cannot tell that a client has gone; a connection can.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from echelon.errors import Exit
from echelon.runs.failure import Failure

SILENCE_LIMIT_S = 14.0
"""A node that is not heard for so long is down or cut off."""
_BEAT_INTERVAL_S = 1.0
_AGREE_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 5.0
_SEND_LOCK = threading.Lock()
_EVERY_ATTEMPT = -1
"""In place of an attempt: there is nobody to start another one with."""

RankHeartbeats = list[dict[str, Any]]
"""What an agent knows of its living ranks: rank, beats, step, begun, still (seconds without a
beat), stopped."""

_STARTING_BEATS = 6
"""While a rank has made fewer it is starting or at rest, and the others may wait for it."""
_STARTING_PATIENCE = 8
"""So many times longer, but less than their collectives wait (train.group.meet)."""


class HungRank(NamedTuple):
    """The rank that keeps all others waiting."""

    rank: int
    limit_s: float


class SingleNodeLifeline:
    """The lifeline of a world of one node: nobody to tell, nobody to lose."""

    def __init__(self) -> None:
        self._failures: dict[int, Failure] = {}
        self._heartbeats: RankHeartbeats = []

    def begin_attempt(self, attempt: int) -> None:
        pass

    def report_heartbeats(self, heartbeats: RankHeartbeats) -> None:
        self._heartbeats = heartbeats

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        """The failure that came first in the whole world, now that this one happened here."""
        return self._failures.setdefault(attempt, failure)

    def find_failure(self, attempt: int) -> Failure | None:
        """The failure of another node, if there is one; a lost node ends every attempt."""
        return self._failures.get(_EVERY_ATTEMPT) or self._failures.get(attempt)

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        """The rank that keeps all others waiting, if nobody has moved for so long."""
        return _find_hung_rank(self._heartbeats, hang_s)

    def leave(self) -> None:
        """Nobody leaves before the others have heard the end."""


@dataclass
class LifelinePeer:
    """Another node as node 0 sees it."""

    connection: socket.socket
    node: int = -1
    host: str = "?"
    ranks: str = "?"
    last_heard: float = field(default_factory=time.monotonic)
    heartbeats: RankHeartbeats | None = None
    """None: not heard in this attempt."""
    partial_line: bytes = b""


class LifelineServer(SingleNodeLifeline):
    """Node 0's end."""

    def __init__(self, address: str, nodes: int) -> None:
        super().__init__()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=nodes)
        self.key = f"{self._listener.getsockname()[1]} {secrets.token_hex(16)}"
        """What the others need to come in."""
        self._nodes = nodes
        self._peers: dict[int, LifelinePeer] = {}
        self._attempt = 0
        self._is_over = False
        self._heartbeats: RankHeartbeats = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._hung_ranks: dict[int, HungRank] = {}
        threading.Thread(target=self._serve, daemon=True, name="lifeline").start()

    def begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        for peer in list(self._peers.values()):
            peer.heartbeats = None

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        with self._lock:
            if self._failures.setdefault(attempt, failure) is failure:
                self._send_to_all({"failure": asdict(failure), "attempt": attempt})
        return self.find_failure(attempt) or failure

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        reports = [self._heartbeats, *(p.heartbeats for p in list(self._peers.values()))]
        if len(reports) < self._nodes or None in reports:
            return None
        stuck = _find_hung_rank([sign for report in reports for sign in report or ()], hang_s)
        if stuck is not None and self._hung_ranks.setdefault(attempt, stuck) is stuck:
            self._send_to_all({"stuck": stuck, "attempt": attempt})
        return self._hung_ranks.get(attempt)

    def leave(self) -> None:
        self._is_over = True
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        while self._peers and time.monotonic() < deadline:
            time.sleep(0.02)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=_BEAT_INTERVAL_S / 2):
                if key.data is None:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._selector.register(
                        connection, selectors.EVENT_READ, LifelinePeer(connection)
                    )
                else:
                    self._read_from_peer(key.data)
            for peer in list(self._peers.values()):
                if time.monotonic() - peer.last_heard > SILENCE_LIMIT_S:
                    self._lose_peer(peer, f"has not been heard for {SILENCE_LIMIT_S:g} s")

    def _read_from_peer(self, peer: LifelinePeer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose_peer(peer, "ended without a word")
            return
        *lines, peer.partial_line = (peer.partial_line + data).split(b"\n")
        for line in lines:
            try:
                self._handle_message(peer, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose_peer(peer, "sent something that is not ours")

    def _handle_message(self, peer: LifelinePeer, message: dict[str, Any]) -> None:
        peer.last_heard = time.monotonic()
        if peer.node < 0 and message.get("key") != self.key:
            self._drop_peer(peer)  # a stranger
            return
        if "key" in message:
            peer.node, peer.host = message["node"], message["host"]
            self._peers[peer.node] = peer
        elif "signs" in message and message["attempt"] == self._attempt:
            peer.heartbeats = message["signs"]
            peer.ranks = (
                _format_rank_span([s["rank"] for s in message["signs"] or ()]) or peer.ranks
            )
        elif "failure" in message:
            self.agree_on_failure(message["attempt"], Failure(**message["failure"]))
        elif "bye" in message:
            self._drop_peer(peer)
        if "bye" not in message:
            _send_line(peer.connection, {"alive": True})

    def _lose_peer(self, peer: LifelinePeer, how: str) -> None:
        known = peer.node in self._peers
        self._drop_peer(peer)
        if known and not self._is_over:
            self.agree_on_failure(
                _EVERY_ATTEMPT,
                make_node_lost_failure(
                    peer.node, peer.host, peer.ranks, how, peer.heartbeats or []
                ),
            )

    def _drop_peer(self, peer: LifelinePeer) -> None:
        self._peers.pop(peer.node, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):
            _send_line(peer.connection, message)


class LifelineClient(SingleNodeLifeline):
    """Every other node's end."""

    def __init__(self, host: str, key: str, node: int, on_lost: Callable[[Failure], None]) -> None:
        super().__init__()
        self._host = host
        self._on_lost = on_lost
        """Called from a thread, because the agent may be waiting for an answer that never comes."""
        port = int(key.split()[0])
        self._connection = socket.create_connection((host, port), timeout=SILENCE_LIMIT_S)
        self._connection.settimeout(_BEAT_INTERVAL_S)
        self._attempt = 0
        self._reported_heartbeats: RankHeartbeats | None = None
        """In this attempt."""
        self._is_over = False
        self._hung_ranks: dict[int, HungRank] = {}
        self._send({"key": key, "node": node, "host": socket.gethostname()})
        self._last_heard = time.monotonic()
        for target in (self._read_messages, self._send_heartbeats):
            threading.Thread(target=target, daemon=True, name="lifeline").start()

    def begin_attempt(self, attempt: int) -> None:
        self._attempt, self._reported_heartbeats = attempt, None

    def report_heartbeats(self, heartbeats: RankHeartbeats) -> None:
        first, self._reported_heartbeats = heartbeats and not self._reported_heartbeats, heartbeats
        if first:  # node 0 can name our ranks from now on
            self._send({"signs": heartbeats, "attempt": self._attempt})

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        self._send({"failure": asdict(failure), "attempt": attempt})
        deadline = time.monotonic() + _AGREE_TIMEOUT_S
        while self.find_failure(attempt) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.find_failure(attempt) or failure

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        return self._hung_ranks.get(attempt)

    def leave(self) -> None:
        self._is_over = True
        self._send({"bye": True})

    def _send(self, message: dict[str, Any]) -> None:
        _send_line(self._connection, message)

    def _send_heartbeats(self) -> None:
        while not self._is_over:
            self._send({"signs": self._reported_heartbeats, "attempt": self._attempt})
            if time.monotonic() - self._last_heard > SILENCE_LIMIT_S:
                self._lose_node_0(f"has not been heard for {SILENCE_LIMIT_S:g} s")
            time.sleep(_BEAT_INTERVAL_S)

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
                self._lose_node_0("ended without a word")
                return
            self._last_heard = time.monotonic()
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._handle_message(json.loads(line))

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            self._failures.setdefault(message["attempt"], Failure(**message["failure"]))
        elif "stuck" in message:
            self._hung_ranks[message["attempt"]] = HungRank(*message["stuck"])

    def _lose_node_0(self, how: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_lost(
                make_node_lost_failure(
                    0, self._host, "0 …", how, self._reported_heartbeats or [], rank=0
                )
            )


def make_node_lost_failure(
    node: int,
    host: str,
    ranks: str,
    reason: str,
    heartbeats: RankHeartbeats,
    rank: int | None = None,
) -> Failure:
    step = max((s["step"] for s in heartbeats if s["begun"]), default=None)
    summary = (
        f"node {node} ({host}, rank {ranks}) {reason}: it is down, cut off, or its agent was killed"
    )
    first = min((s["rank"] for s in heartbeats), default=0)
    return Failure(first if rank is None else rank, host, step, summary, "", int(Exit.NODE_LOST))


def _find_hung_rank(heartbeats: RankHeartbeats, hang_s: float) -> HungRank | None:
    """Nobody moves: then the one with the fewest beats is the one the others wait for."""
    if not hang_s or not any(s["begun"] for s in heartbeats):
        return None
    limit_s = hang_s
    if any(s["beats"] <= _STARTING_BEATS for s in heartbeats):
        limit_s *= _STARTING_PATIENCE if len(heartbeats) > 1 else math.inf
    if any(s["still"] < limit_s for s in heartbeats):  # somebody is only slow
        return None
    return HungRank(min(heartbeats, key=lambda s: (not s["stopped"], s["beats"]))["rank"], limit_s)


def _format_rank_span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}–{max(ranks)}" if ranks else ""


def _send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Whole lines, from any thread; where one does not go through, the connection is of no use."""
    line = json.dumps(message).encode() + b"\n"
    with _SEND_LOCK:
        try:
            connection.sendall(line)
        except OSError:  # whoever reads from it notices
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
