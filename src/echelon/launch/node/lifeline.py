"""How nodes learn that another one died, was cut off or hangs.

The agent of every node holds one connection to node 0's agent and exchanges messages over it, as
`message_channel.py` describes. A closed connection or silence is a lost node. Node 0 decides which
failure was the first and tells everybody at once. torch's store cannot do this: it does not know
when a client is gone.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from echelon.errors import ExitCode
from echelon.launch.node.message_channel import (
    ChannelClosed,
    ChannelListener,
    MessageChannel,
    connect_channel,
    encode_message,
)
from echelon.runs.failure import Failure
from echelon.world.rounds import Round

SILENCE_LIMIT_S = 14.0
"""A node that sends nothing for so long is down or cut off."""
_BEAT_INTERVAL_S = 1.0
_AGREE_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 5.0
_EVERY_ATTEMPT = -1
"""In place of an attempt: a lost node ends all of them, as nobody is left to restart with."""

RankHeartbeats = list[dict[str, Any]]
"""What an agent knows of its living ranks: rank, beats, step, begun, still (seconds without a
beat), stopped."""

_STARTING_BEATS = 6
"""A rank with no more heartbeats than this is still starting, and the others may wait for it."""
_STARTING_PATIENCE = 8
"""So many times longer, but less than their collectives wait (parallel/process_group.py). It is not
shorter for a small `launch.hang_s`: nothing tells a first step that is slow (CUDA and its libraries
load, loader processes start) from one that hangs."""


class HungRank(NamedTuple):
    """The rank for which all others wait."""

    rank: int
    limit_s: float


class RankLoss(NamedTuple):
    """Ranks that are lost while the others could go on."""

    slots: list[int]
    failure: Failure


class HeartbeatReport(NamedTuple):
    """The heartbeats of one node together with the attempt that they belong to.

    One value, because two threads exchange it: an attempt that begins between reading the number
    and reading the heartbeats would give it those of the attempt before.
    """

    attempt: int
    heartbeats: RankHeartbeats | None
    """None: nothing is known of the ranks in this attempt."""


class Lifeline:
    """The lifeline of a world of one node, which has nobody to inform; also the interface of the
    others."""

    def __init__(self) -> None:
        self._failures: dict[int, Failure] = {}
        self._heartbeats: RankHeartbeats = []
        self._losses: deque[tuple[int, RankLoss]] = deque()
        self._replacements: dict[int, dict[int, int]] = {}
        self._rounds: dict[int, Round] = {}
        self.on_stack_message: Callable[[dict[str, Any]], None] = lambda message: None
        """Called from a thread with what another node sends about stacks; see
        `stack_exchange.py`."""

    def begin_attempt(self, attempt: int) -> None:
        """Forget the heartbeats of the attempt before."""
        pass

    def report_heartbeats(self, heartbeats: RankHeartbeats) -> None:
        """Take the heartbeats of the ranks of this node."""
        self._heartbeats = heartbeats

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        """Return the first failure of the whole world in this attempt, now that this one happened
        here."""
        return self._failures.setdefault(attempt, failure)

    def find_failure(self, attempt: int) -> Failure | None:
        """Return the failure that is known of this attempt, if there is one. A lost node ends every
        attempt."""
        return self._failures.get(_EVERY_ATTEMPT) or self._failures.get(attempt)

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        """Return the rank for which all others wait, if no rank has moved for so long; else
        None."""
        return _find_hung_rank(self._heartbeats, hang_s)

    # --- ranks that are replaced; see `rank_replacement.py` ---

    def report_loss(self, attempt: int, loss: RankLoss) -> None:
        """Tell node 0 that ranks are lost."""
        for slot in loss.slots:  # it may have been a replacement, whose offer is void
            self._replacements.get(attempt, {}).pop(slot, None)
        self._losses.append((attempt, loss))

    def take_losses(self, attempt: int) -> list[RankLoss]:
        """Return what was reported since the last call, on node 0."""
        taken = [self._losses.popleft() for _ in range(len(self._losses))]
        return [loss for of_attempt, loss in taken if of_attempt == attempt]

    def report_replacement(self, attempt: int, slot: int, incarnation: int) -> None:
        """Tell node 0 that a replacement of this rank was started, and which one it is."""
        self._replacements.setdefault(attempt, {})[slot] = incarnation

    def get_replacements(self, attempt: int) -> dict[int, int]:
        """Return the newest replacement of every rank that had one, on node 0."""
        return dict(self._replacements.get(attempt, {}))

    def announce_round(self, attempt: int, round_: Round) -> None:
        """Tell all nodes which round has begun, from node 0."""
        self._rounds[attempt] = round_

    def find_round(self, attempt: int) -> Round | None:
        """Return the newest round that was announced; None in round 0."""
        return self._rounds.get(attempt)

    def find_newest_step(self) -> int:
        """Return the newest step that is known of any rank, on node 0."""
        return max((sign["step"] for sign in self._heartbeats), default=0)

    def send_stack_message(self, message: dict[str, Any]) -> None:
        """Send a message about stacks: from node 0 to all others, from the others to node 0."""

    def leave(self) -> None:
        """Close the lifeline, on node 0 after the others have: nobody leaves before all know how it
        ended."""


@dataclass
class LifelinePeer:
    """Another node as node 0 sees it."""

    channel: MessageChannel
    node: int = -1
    host: str = "?"
    ranks: str = "?"
    last_heard: float = field(default_factory=time.monotonic)
    report: HeartbeatReport = field(default=HeartbeatReport(0, None))
    """What it has sent last."""

    def get_heartbeats(self, attempt: int) -> RankHeartbeats | None:
        """Return the heartbeats of its ranks in this attempt; None before it has reported any."""
        report = self.report
        return report.heartbeats if report.attempt == attempt else None


class LifelineServer(Lifeline):
    """Node 0's end of all lifelines. A thread reads from them."""

    def __init__(self, address: str, nodes: int, key: bytes) -> None:
        super().__init__()
        self._listener = ChannelListener(address, key, nodes)
        self.port = self._listener.port
        """Where the other nodes connect to."""
        self._nodes = nodes
        self._connected: dict[MessageChannel, LifelinePeer] = {}
        self._peers: dict[int, LifelinePeer] = {}
        self._attempt = 0
        self._is_over = False
        self._heartbeats: RankHeartbeats = []
        self._lock = threading.Lock()
        self._hung_ranks: dict[int, HungRank] = {}
        threading.Thread(target=self._serve, daemon=True, name="lifeline").start()

    def begin_attempt(self, attempt: int) -> None:
        """Take heartbeats of this attempt only, whenever those of others arrive."""
        self._attempt = attempt

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        """Record this failure if it is the first of the attempt, send it to all nodes, and return
        the first one."""
        # The agent and the reading thread both call this. Under the lock, exactly one failure is
        # the first, and exactly one is sent.
        with self._lock:
            if self._failures.setdefault(attempt, failure) is failure:
                self._send_to_all({"failure": asdict(failure), "attempt": attempt})
        return self.find_failure(attempt) or failure

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        """Return the hung rank of the whole world, and announce it to all nodes once.

        It returns None until every node has reported in this attempt: a rank of a silent node may
        be the one that the others wait for, and another would be blamed.
        """
        peers = list(self._peers.values())
        reports = [self._heartbeats, *(peer.get_heartbeats(attempt) for peer in peers)]
        if len(reports) < self._nodes or None in reports:
            return None
        stuck = _find_hung_rank([sign for report in reports for sign in report or ()], hang_s)
        if stuck is not None and self._hung_ranks.setdefault(attempt, stuck) is stuck:
            self._send_to_all({"stuck": stuck, "attempt": attempt})
        return self._hung_ranks.get(attempt)

    def announce_round(self, attempt: int, round_: Round) -> None:
        super().announce_round(attempt, round_)
        self._hung_ranks.pop(attempt, None)
        for peer in list(self._peers.values()):  # what they sent before is of the round before
            peer.report = HeartbeatReport(attempt, None)
        self._send_to_all({"round": asdict(round_), "attempt": attempt})

    def find_newest_step(self) -> int:
        peers = [peer.get_heartbeats(self._attempt) or [] for peer in list(self._peers.values())]
        signs = [sign for signs in (self._heartbeats, *peers) for sign in signs]
        return max((sign["step"] for sign in signs), default=0)

    def send_stack_message(self, message: dict[str, Any]) -> None:
        self._send_to_all({"stacks": message})

    def leave(self) -> None:
        """Wait until the other nodes have left, but not for ever.

        `_is_over` is set first, so that a connection that closes from now on is not a lost node.
        """
        self._is_over = True
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        while self._peers and time.monotonic() < deadline:
            time.sleep(0.02)

    def _serve(self) -> None:
        """Accept nodes and read from them. It runs in its own thread."""
        while True:
            for event in self._listener.poll(_BEAT_INTERVAL_S / 2):
                peer = self._connected.setdefault(event.channel, LifelinePeer(event.channel))
                self._read_from_peer(peer, event.messages)
                if event.end:
                    self._lose_peer(peer, event.end)
            for peer in list(self._peers.values()):
                if time.monotonic() - peer.last_heard > SILENCE_LIMIT_S:
                    self._lose_peer(peer, f"has sent nothing for {SILENCE_LIMIT_S:g} s")

    def _read_from_peer(self, peer: LifelinePeer, messages: list[dict[str, Any]]) -> None:
        """Handle what a node has sent."""
        for message in messages:
            try:
                self._handle_message(peer, message)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._lose_peer(peer, "sent something that is not a message of ours")

    def _handle_message(self, peer: LifelinePeer, message: dict[str, Any]) -> None:
        """Handle one message of a node. The first one says which node it is."""
        peer.last_heard = time.monotonic()
        if "node" in message:
            peer.node, peer.host = message["node"], message["host"]
            self._peers[peer.node] = peer
        elif "signs" in message:
            peer.report = HeartbeatReport(message["attempt"], message["signs"])
            peer.ranks = (
                _format_rank_span([s["rank"] for s in message["signs"] or ()]) or peer.ranks
            )
        elif "failure" in message:
            self.agree_on_failure(message["attempt"], Failure(**message["failure"]))
        elif "lost" in message:
            loss = RankLoss(message["lost"], Failure(**message["cause"]))
            self.report_loss(message["attempt"], loss)
        elif "replacement" in message:
            slot, incarnation = message["replacement"]
            self.report_replacement(message["attempt"], slot, incarnation)
        elif "stacks" in message:
            self.on_stack_message(message["stacks"])
        elif "bye" in message:
            self._drop_peer(peer)
        if "bye" not in message:
            peer.channel.send({"alive": True})

    def _lose_peer(self, peer: LifelinePeer, how: str) -> None:
        """Drop a node and report it as lost, unless it had said goodbye or all is over."""
        was_connected = peer.node in self._peers
        self._drop_peer(peer)
        if was_connected and not self._is_over:
            self.agree_on_failure(
                _EVERY_ATTEMPT,
                make_node_lost_failure(
                    peer.node,
                    peer.host,
                    peer.ranks,
                    how,
                    peer.get_heartbeats(self._attempt) or [],
                ),
            )

    def _drop_peer(self, peer: LifelinePeer) -> None:
        """Close the connection to a node."""
        self._peers.pop(peer.node, None)
        self._connected.pop(peer.channel, None)
        self._listener.close_channel(peer.channel)

    def _send_to_all(self, message: dict[str, Any]) -> None:
        """Send a message to every other node."""
        body = encode_message(message)
        for peer in list(self._peers.values()):
            peer.channel.send_encoded(body)


class LifelineClient(Lifeline):
    """The end of every node but node 0. One thread reads, another sends heartbeats."""

    def __init__(
        self, host: str, port: int, key: bytes, node: int, on_lost: Callable[[Failure], None]
    ) -> None:
        super().__init__()
        self._host = host
        self._on_lost = on_lost
        """Called from a thread, because the agent may be waiting for an answer that never comes."""
        self._channel = connect_channel(host, port, key, SILENCE_LIMIT_S)
        self._report = HeartbeatReport(0, None)
        self._is_over = False
        self._hung_ranks: dict[int, HungRank] = {}
        self._send({"node": node, "host": socket.gethostname()})
        self._last_heard = time.monotonic()
        for target in (self._read_messages, self._send_heartbeats):
            threading.Thread(target=target, daemon=True, name="lifeline").start()

    def begin_attempt(self, attempt: int) -> None:
        self._report = HeartbeatReport(attempt, None)

    def report_heartbeats(self, heartbeats: RankHeartbeats) -> None:
        is_first = heartbeats and not self._report.heartbeats
        self._report = HeartbeatReport(self._report.attempt, heartbeats)
        if is_first:  # from now on node 0 can name the ranks of this node
            self._send_report()

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        """Report a failure to node 0, and return the one that node 0 has decided was the first.

        If node 0 does not answer in time, this node's own failure is returned.
        """
        self._send({"failure": asdict(failure), "attempt": attempt})
        deadline = time.monotonic() + _AGREE_TIMEOUT_S
        while self.find_failure(attempt) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.find_failure(attempt) or failure

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        """Return the rank that node 0 has announced; only node 0 sees the heartbeats of all."""
        return self._hung_ranks.get(attempt)

    def report_loss(self, attempt: int, loss: RankLoss) -> None:
        self._send({"lost": loss.slots, "cause": asdict(loss.failure), "attempt": attempt})

    def report_replacement(self, attempt: int, slot: int, incarnation: int) -> None:
        self._send({"replacement": [slot, incarnation], "attempt": attempt})

    def send_stack_message(self, message: dict[str, Any]) -> None:
        self._send({"stacks": message})

    def leave(self) -> None:
        """Say goodbye to node 0, which would otherwise report this node as lost."""
        self._is_over = True
        self._send({"bye": True})

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(message)

    def _send_report(self) -> None:
        """Send what is known of the ranks of this node."""
        report = self._report
        self._send({"signs": report.heartbeats, "attempt": report.attempt})

    def _send_heartbeats(self) -> None:
        """Send the heartbeats every second, and notice when node 0 is silent."""
        while not self._is_over:
            self._send_report()
            if time.monotonic() - self._last_heard > SILENCE_LIMIT_S:
                self._lose_node_0(f"has sent nothing for {SILENCE_LIMIT_S:g} s")
            time.sleep(_BEAT_INTERVAL_S)

    def _read_messages(self) -> None:
        """Read node 0's messages until the connection ends."""
        while not self._is_over:
            try:
                messages = self._channel.receive()
            except ChannelClosed as end:
                self._lose_node_0(str(end))
                return
            if messages:
                self._last_heard = time.monotonic()
            for message in messages:
                self._handle_message(message)

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Keep what node 0 decided: a failure, or a rank that hangs."""
        if "failure" in message:
            self._failures.setdefault(message["attempt"], Failure(**message["failure"]))
        elif "stuck" in message:
            self._hung_ranks[message["attempt"]] = HungRank(*message["stuck"])
        elif "round" in message:
            self._hung_ranks.pop(message["attempt"], None)
            self._rounds[message["attempt"]] = Round.from_fields(message["round"])
        elif "stacks" in message:
            self.on_stack_message(message["stacks"])

    def _lose_node_0(self, how: str) -> None:
        """Report node 0 as lost, once."""
        if not self._is_over:
            self._is_over = True
            self._on_lost(
                make_node_lost_failure(
                    0, self._host, "0 …", how, self._report.heartbeats or [], rank=0
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
    """Return the failure of a world that lost a node."""
    step = max((s["step"] for s in heartbeats if s["begun"]), default=None)
    summary = (
        f"node {node} ({host}, rank {ranks}) {reason}: it is down, cut off, or its agent was killed"
    )
    first = min((s["rank"] for s in heartbeats), default=0)
    return Failure(
        first if rank is None else rank, host, step, summary, "", int(ExitCode.NODE_LOST)
    )


def _find_hung_rank(heartbeats: RankHeartbeats, hang_s: float) -> HungRank | None:
    """Return the rank for which all others wait, if no rank has moved for `hang_s` seconds.

    It is the one with the fewest heartbeats, or one that is halted. While a rank is starting, the
    limit is longer; while any rank moves, the world is only slow.
    """
    if not hang_s or not any(s["begun"] for s in heartbeats):
        return None
    limit_s = hang_s
    if any(s["beats"] <= _STARTING_BEATS for s in heartbeats):
        limit_s *= _STARTING_PATIENCE if len(heartbeats) > 1 else math.inf
    if any(s["still"] < limit_s for s in heartbeats):  # that rank is only slow
        return None
    return HungRank(min(heartbeats, key=lambda s: (not s["stopped"], s["beats"]))["rank"], limit_s)


def _format_rank_span(ranks: list[int]) -> str:
    """`3`, or `4–7`."""
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}–{max(ranks)}" if ranks else ""
