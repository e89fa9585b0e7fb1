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
from echelon.failure import Failure

SILENCE_S = 14.0
"""A node that is not heard for so long is down or cut off."""
_BEAT_S = 1.0
_AGREE_S = 3.0
_PART_S = 5.0
_SENDING = threading.Lock()
_FOR_GOOD = -1
"""In place of an attempt: there is nobody to start another one with."""

Signs = list[dict[str, Any]]
"""What an agent knows of its living ranks: rank, beats, step, begun, still (seconds without a
beat), stopped."""

_STARTING_BEATS = 6
"""While a rank has made fewer it is starting or at rest, and the others may wait for it."""
_STARTING_PATIENCE = 8
"""So many times longer, but less than their collectives wait (train.group.meet)."""


class Stuck(NamedTuple):
    """The rank that keeps all others waiting."""

    rank: int
    limit_s: float


class Alone:
    """The lifeline of a world of one node: nobody to tell, nobody to lose."""

    def __init__(self) -> None:
        self._told: dict[int, Failure] = {}
        self._signs: Signs = []

    def begin(self, attempt: int) -> None:
        pass

    def report(self, signs: Signs) -> None:
        self._signs = signs

    def agree(self, attempt: int, failure: Failure) -> Failure:
        """The failure that came first in the whole world, now that this one happened here."""
        return self._told.setdefault(attempt, failure)

    def verdict(self, attempt: int) -> Failure | None:
        """The failure of another node, if there is one; a lost node ends every attempt."""
        return self._told.get(_FOR_GOOD) or self._told.get(attempt)

    def stuck(self, attempt: int, hang_s: float) -> Stuck | None:
        """The rank that keeps all others waiting, if nobody has moved for so long."""
        return _stuck(self._signs, hang_s)

    def part(self) -> None:
        """Nobody leaves before the others have heard the end."""


@dataclass
class Peer:
    """Another node as node 0 sees it."""

    connection: socket.socket
    node: int = -1
    host: str = "?"
    ranks: str = "?"
    heard: float = field(default_factory=time.monotonic)
    signs: Signs | None = None
    """None: not heard in this attempt."""
    text: bytes = b""


class Hub(Alone):
    """Node 0's end."""

    def __init__(self, address: str, nodes: int) -> None:
        super().__init__()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=nodes)
        self.key = f"{self._listener.getsockname()[1]} {secrets.token_hex(16)}"
        """What the others need to come in."""
        self._nodes = nodes
        self._peers: dict[int, Peer] = {}
        self._attempt = 0
        self._over = False
        self._signs: Signs = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._stuck: dict[int, Stuck] = {}
        threading.Thread(target=self._serve, daemon=True, name="lifeline").start()

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        for peer in list(self._peers.values()):
            peer.signs = None

    def agree(self, attempt: int, failure: Failure) -> Failure:
        with self._lock:
            if self._told.setdefault(attempt, failure) is failure:
                self._tell_all({"failure": asdict(failure), "attempt": attempt})
        return self.verdict(attempt) or failure

    def stuck(self, attempt: int, hang_s: float) -> Stuck | None:
        reports = [self._signs, *(p.signs for p in list(self._peers.values()))]
        if len(reports) < self._nodes or None in reports:
            return None
        stuck = _stuck([sign for report in reports for sign in report or ()], hang_s)
        if stuck is not None and self._stuck.setdefault(attempt, stuck) is stuck:
            self._tell_all({"stuck": stuck, "attempt": attempt})
        return self._stuck.get(attempt)

    def part(self) -> None:
        self._over = True
        deadline = time.monotonic() + _PART_S
        while self._peers and time.monotonic() < deadline:
            time.sleep(0.02)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=_BEAT_S / 2):
                if key.data is None:
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._selector.register(connection, selectors.EVENT_READ, Peer(connection))
                else:
                    self._hear(key.data)
            for peer in list(self._peers.values()):
                if time.monotonic() - peer.heard > SILENCE_S:
                    self._lose(peer, f"has not been heard for {SILENCE_S:g} s")

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose(peer, "ended without a word")
            return
        *lines, peer.text = (peer.text + data).split(b"\n")
        for line in lines:
            try:
                self._take(peer, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose(peer, "sent something that is not ours")

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if peer.node < 0 and message.get("key") != self.key:
            self._drop(peer)  # a stranger
            return
        if "key" in message:
            peer.node, peer.host = message["node"], message["host"]
            self._peers[peer.node] = peer
        elif "signs" in message and message["attempt"] == self._attempt:
            peer.signs = message["signs"]
            peer.ranks = _span([s["rank"] for s in message["signs"] or ()]) or peer.ranks
        elif "failure" in message:
            self.agree(message["attempt"], Failure(**message["failure"]))
        elif "bye" in message:
            self._drop(peer)
        if "bye" not in message:
            _send(peer.connection, {"alive": True})

    def _lose(self, peer: Peer, how: str) -> None:
        known = peer.node in self._peers
        self._drop(peer)
        if known and not self._over:
            self.agree(_FOR_GOOD, lost(peer.node, peer.host, peer.ranks, how, peer.signs or []))

    def _drop(self, peer: Peer) -> None:
        self._peers.pop(peer.node, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):
            _send(peer.connection, message)


class Spoke(Alone):
    """Every other node's end."""

    def __init__(self, host: str, key: str, node: int, on_lost: Callable[[Failure], None]) -> None:
        super().__init__()
        self._host = host
        self._on_lost = on_lost
        """Called from a thread, because the agent may be waiting for an answer that never comes."""
        port = int(key.split()[0])
        self._connection = socket.create_connection((host, port), timeout=SILENCE_S)
        self._connection.settimeout(_BEAT_S)
        self._attempt = 0
        self._reported: Signs | None = None
        """In this attempt."""
        self._over = False
        self._stuck: dict[int, Stuck] = {}
        self._say({"key": key, "node": node, "host": socket.gethostname()})
        self._heard = time.monotonic()
        for target in (self._listen, self._beat):
            threading.Thread(target=target, daemon=True, name="lifeline").start()

    def begin(self, attempt: int) -> None:
        self._attempt, self._reported = attempt, None

    def report(self, signs: Signs) -> None:
        first, self._reported = signs and not self._reported, signs
        if first:  # node 0 can name our ranks from now on
            self._say({"signs": signs, "attempt": self._attempt})

    def agree(self, attempt: int, failure: Failure) -> Failure:
        self._say({"failure": asdict(failure), "attempt": attempt})
        deadline = time.monotonic() + _AGREE_S
        while self.verdict(attempt) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.verdict(attempt) or failure

    def stuck(self, attempt: int, hang_s: float) -> Stuck | None:
        return self._stuck.get(attempt)

    def part(self) -> None:
        self._over = True
        self._say({"bye": True})

    def _say(self, message: dict[str, Any]) -> None:
        _send(self._connection, message)

    def _beat(self) -> None:
        while not self._over:
            self._say({"signs": self._reported, "attempt": self._attempt})
            if time.monotonic() - self._heard > SILENCE_S:
                self._lost(f"has not been heard for {SILENCE_S:g} s")
            time.sleep(_BEAT_S)

    def _listen(self) -> None:
        text = b""
        while not self._over:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                self._lost("ended without a word")
                return
            self._heard = time.monotonic()
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            self._told.setdefault(message["attempt"], Failure(**message["failure"]))
        elif "stuck" in message:
            self._stuck[message["attempt"]] = Stuck(*message["stuck"])

    def _lost(self, how: str) -> None:
        if not self._over:
            self._over = True
            self._on_lost(lost(0, self._host, "0 …", how, self._reported or [], rank=0))


def lost(
    node: int, host: str, ranks: str, how: str, signs: Signs, rank: int | None = None
) -> Failure:
    step = max((s["step"] for s in signs if s["begun"]), default=None)
    summary = (
        f"node {node} ({host}, rank {ranks}) {how}: it is down, cut off, or its agent was killed"
    )
    first = min((s["rank"] for s in signs), default=0)
    return Failure(first if rank is None else rank, host, step, summary, "", int(Exit.NODE_LOST))


def _stuck(signs: Signs, hang_s: float) -> Stuck | None:
    """Nobody moves: then the one with the fewest beats is the one the others wait for."""
    if not hang_s or not any(s["begun"] for s in signs):
        return None
    limit_s = hang_s
    if any(s["beats"] <= _STARTING_BEATS for s in signs):
        limit_s *= _STARTING_PATIENCE if len(signs) > 1 else math.inf
    if any(s["still"] < limit_s for s in signs):  # somebody is only slow
        return None
    return Stuck(min(signs, key=lambda s: (not s["stopped"], s["beats"]))["rank"], limit_s)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}–{max(ranks)}" if ranks else ""


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Whole lines, from any thread; where one does not go through, the connection is of no use."""
    line = json.dumps(message).encode() + b"\n"
    with _SENDING:
        try:
            connection.sendall(line)
        except OSError:  # whoever reads from it notices
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
