"""How nodes learn that another one died, was cut off or hangs, and who of them leads.

The agent of every node holds one TCP connection to the agent that leads, at first node 0's, and
exchanges messages over it (`lifeline_sockets.py`); where there are many nodes, over another agent
that passes them on (`lifeline_relay.py`). A closed connection or silence is a lost node.
The leader decides which failure was the first, which nodes make up the world (`membership.py`) and
which round comes next, and tells everybody at once. torch's store cannot do this: it does not know
when a client is gone.

Every agent stands by to lead. Where the leader is lost the others hold an election: the lowest node
that still lives leads, if a majority of the nodes connects to it and accepts. A leader that is to
leave on purpose resigns first: the same election, in which it takes part.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from echelon.errors import EchelonError
from echelon.launch.node.hang_detection import HungRank, RankHeartbeats, find_hung_rank
from echelon.launch.node.lifeline_relay import FANOUT
from echelon.launch.node.lifeline_sockets import LeaderConnection, NodeServer
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.message_channel import Message
from echelon.launch.node.node_reports import (
    HeartbeatReport,
    LostNode,
    Notice,
    OwnReports,
    RankLoss,
    SlotAssignment,
    make_loss_message,
    make_node_lost_failure,
)
from echelon.runs.failure import Failure
from echelon.world.rounds import Round

SILENCE_LIMIT_S = 14.0
"""Default of `launch.silence_s`."""
_AGREE_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 5.0
_ACCEPT_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 1.5
"""For a node that may lead: it listens already, or is lost as well."""
_ELECTION_SLACK_S = 8.0
"""Nodes notice the loss of a leader at different times, by a heartbeat and by their load."""
_LATE_NODES_S = 3.0
"""How long an election waits for living nodes beyond a majority: those that come later are lost."""
_POLL_S = 0.01
_ASK_INTERVAL_S = 1.0
_KEPT_MEMBERSHIPS = 16
_EVERY_ATTEMPT = -1
"""In place of an attempt: a lost node ends all of them, where nobody is left to restart with."""


class Lifeline:
    """One node's end of the lifelines. A world of one node has no connections; its only node
    leads.

    Methods are called by the agent; messages arrive in threads.
    """

    def __init__(
        self,
        own: Member | None = None,
        silence_s: float = SILENCE_LIMIT_S,
        fanout: int = FANOUT,
    ) -> None:
        self.own = own or Member(0, socket.gethostname(), place=0)
        self.is_leader = True
        self.is_isolated = False
        """Whether this node ends because it has no majority: the others may go on without it."""
        self.leader_changes = 0
        self.membership = Membership(0, self.own.node, {self.own.node: self.own})
        self._committed = self.membership
        """The newest membership that a quorum of the one before it has accepted."""
        self._accepted: dict[int, int] = {}
        """Node → the epoch of the membership that it has accepted last."""
        self._accepted_counts: Counter[int] = Counter()
        """Epoch → how many acceptances have come."""
        self._is_unsent = False
        """Whether the other nodes have yet to hear of the membership."""
        self._sent: deque[Membership] = deque(maxlen=_KEPT_MEMBERSHIPS)
        """The memberships that all nodes were sent last, by this leader."""
        self._silence_s, self._fanout = silence_s, fanout
        self._server: NodeServer | None = None
        self._leader: LeaderConnection | None = None
        self._leading_member = Member(0, "node 0", place=0)
        """The leader, as it has introduced itself."""
        self._key = b""
        self._nodes = 1
        self._on_ended: Callable[[Failure], None] = lambda failure: None
        self._lock = threading.RLock()
        self._is_over = False
        self._votes: dict[int, Message] = {}
        """Node → how it introduced itself to this one, which does not lead yet."""
        self.is_electing = False
        """Whether the leader is lost or has resigned, and no other one found yet."""
        self._is_waiting = False
        """Whether the node over which the leader was reached looks for another one."""
        self._is_candidate = False
        """Whether others would follow this node, which was waiting."""
        self.is_handed_over = False
        """Whether this node leads since the leader before it has resigned: no rank was lost."""
        self.is_released = False
        """Whether this node was to leave on purpose, and the others go on without its ranks."""

        self._attempt = 0
        self._failures: dict[int, Failure] = {}
        self._report = HeartbeatReport(0, None)
        self._reports: dict[int, HeartbeatReport] = {}
        """Of the other nodes, on the leader."""
        self._hung_ranks: dict[int, HungRank] = {}
        self._losses: deque[tuple[int, RankLoss]] = deque()
        self._lost_nodes: deque[LostNode] = deque()
        self._notices: dict[int, Notice] = {}
        self._replacements: dict[int, dict[int, int]] = {}
        self._rounds: dict[int, Round] = {}
        self._done: dict[int, dict[int, int]] = {}
        """Attempt → node → exit code, on the leader."""
        self._ended: dict[int, int] = {}
        self._ending: set[int] = set()
        self._own_reports = OwnReports()
        self._machine_faults: dict[str, str] = {}
        """Host → what is wrong with it, on the leader."""
        self._assignment: SlotAssignment | None = None
        self.stop_reason = ""
        """Why all ranks are to save and end, if the leader has said so."""
        self.over_code: int | None = None
        """The exit code of the run, once the leader has said that it is over."""
        self.on_stack_message: Callable[[dict[str, Any]], None] = lambda message: None
        """Called from a thread with what another node sends about stacks; see
        `stack_exchange.py`."""
        self.on_leader_lost: Callable[[], None] = lambda: None
        """Called from a thread: the leader's store answers no more, and nobody should wait."""

    # --- opening ---

    def open_as_leader(self, listening_address: str, host: str, key: bytes, nodes: int) -> int:
        """Listen for the other nodes, which reach this one at `host` and have the same key; returns
        the port. `nodes` is how many may come."""
        self._key, self._nodes = key, nodes
        server = self._open_server(listening_address)
        server.is_root = True
        self.own = replace(self.own, lifeline=f"{host}:{server.port}")
        self.membership = replace(self.membership, members={self.own.node: self.own})
        self._committed = self.membership
        return server.port

    def open_as_follower(
        self,
        address: str,
        key: bytes,
        nodes: int,
        on_ended: Callable[[Failure], None],
        host_store: Callable[[str], str] = lambda address: "",
    ) -> None:
        """Connect to the leader at HOST:PORT.

        `on_ended` is called from a thread when this node has lost the others: the agent may be
        waiting for an answer that never comes. `host_store` opens the store that the world uses
        should this node lead, at an address of this machine, and returns HOST:PORT of it.
        """
        self._key, self._nodes, self._on_ended = key, nodes, on_ended
        self.is_leader = False
        self.membership = self._committed = Membership(-1, -1)
        self._leader = self._open_connection(address, self._silence_s)
        own = self._leader.own_address
        server = self._open_server(own)
        self.own = replace(self.own, lifeline=f"{own}:{server.port}", store=host_store(own))
        self._leader.start(server, self.own.node, self._make_introduction)

    def _open_server(self, address: str) -> NodeServer:
        self._server = NodeServer(
            address,
            self._key,
            self._nodes,
            self._silence_s,
            self._handle_from_node,
            self._on_node_lost,
            self._send_membership_if_changed,
            self._fanout,
        )
        return self._server

    def _open_connection(self, address: str, timeout_s: float) -> LeaderConnection:
        connection = LeaderConnection(
            address,
            self._key,
            timeout_s,
            self._silence_s,
            self._make_beat,
            self._handle_from_leader,
            lambda how: self._on_connection_lost(connection, how),
            lambda how: self._on_connection_lost(connection, how, is_waiting=True),
            lambda: self._find_leader_address(address),
        )
        return connection

    def _find_leader_address(self, first: str) -> str:
        """Return where the leader listens; "" if there is none."""
        leader = self.membership.members.get(self.membership.leader)
        return "" if self.is_electing else leader.lifeline if leader is not None else first

    def _make_introduction(self) -> Message:
        """Return what a leader has to know of this node. Of what all nodes know it has numbers
        only: thousands introduce themselves to a new leader."""
        return {
            "member": asdict(self.own),
            "knows": [self.membership.epoch, self.membership.leader],
            "rounds": [[attempt, r.number] for attempt, r in self._rounds.items()],
            "state": self._own_reports.to_messages(),
        }

    def _make_knowledge(self) -> Message:
        """Return all that a new leader may have missed."""
        rounds = [[attempt, asdict(r)] for attempt, r in self._rounds.items()]
        return {"knowledge": self.membership.to_fields(), "rounds": rounds}

    # --- sending ---

    def _send_to_leader(self, message: Message) -> None:
        """Send a message to the leader; handle it here where this node leads."""
        if self.is_leader:
            self._handle_from_node(self.own.node, message)
        elif self._leader is not None:
            self._leader.send(message)

    def _send_to_all(self, message: Message) -> None:
        if self._server is not None:
            self._server.send_to_all(message)

    def _make_beat(self) -> Message:
        report = self._report
        return {"heartbeats": report.heartbeats, "attempt": report.attempt}

    # --- attempts, heartbeats and failures ---

    def begin_attempt(self, attempt: int, slots: Iterable[int] = (), place: int = 0) -> None:
        """Take heartbeats of this attempt only, whenever those of others arrive, and tell the
        leader which ranks this node runs."""
        self._attempt, self._report = attempt, HeartbeatReport(attempt, None)
        self.own = replace(self.own, slots=tuple(slots), place=place)
        self._send_to_leader({"member": asdict(self.own)})
        if self.is_leader:
            self._send_to_all({"leader": asdict(self.own)})

    def report_heartbeats(self, heartbeats: RankHeartbeats) -> None:
        """Take the heartbeats of the ranks of this node."""
        is_first = heartbeats and not self._report.heartbeats
        self._report = HeartbeatReport(self._attempt, heartbeats)
        if is_first and self._leader is not None:  # from now on the leader can name its ranks
            self._leader.send(self._make_beat())

    def agree_on_failure(self, attempt: int, failure: Failure) -> Failure:
        """Return the first failure of the whole world in this attempt, now that this one happened
        here. If the leader does not answer in time, it is this node's own."""
        if self.is_leader:
            # The agent and a reading thread both call this. Under the lock, exactly one failure is
            # the first, and exactly one is sent.
            with self._lock:
                if self._failures.setdefault(attempt, failure) is failure:
                    self._send_to_all({"failure": asdict(failure), "attempt": attempt})
            return self.find_failure(attempt) or failure
        self._send_to_leader({"failure": asdict(failure), "attempt": attempt})
        _wait_until(lambda: self.find_failure(attempt) is not None, _AGREE_TIMEOUT_S)
        return self.find_failure(attempt) or failure

    def find_failure(self, attempt: int) -> Failure | None:
        """Return the failure that is known of this attempt, if there is one. A lost node that the
        others cannot go on without ends every attempt."""
        return self._failures.get(_EVERY_ATTEMPT) or self._failures.get(attempt)

    def end_every_attempt(self, failure: Failure) -> None:
        """On the leader: nobody is left to go on or restart with."""
        self.agree_on_failure(_EVERY_ATTEMPT, failure)

    def find_hung_rank(self, attempt: int, hang_s: float) -> HungRank | None:
        """Return the rank for which all others wait, if no rank has moved for so long; else None.
        Only the leader sees the heartbeats of all, and announces it to all nodes once.

        It returns None until every node has reported in this attempt: a rank of a silent node may
        be the one that the others wait for, and another would be blamed.
        """
        if self._server is None:
            return find_hung_rank(self._report.heartbeats or [], hang_s)
        if self.is_leader:
            reports = [self._get_heartbeats(n, attempt) for n in self._list_reporting_nodes()]
            if None in reports:
                return None
            hung = find_hung_rank(
                [heartbeat for report in reports for heartbeat in report or ()], hang_s
            )
            if hung is not None and self._hung_ranks.setdefault(attempt, hung) is hung:
                self._send_to_all({"hung": hung, "attempt": attempt})
        return self._hung_ranks.get(attempt)

    def find_newest_step(self) -> int:
        """Return the newest step of any rank, as far as it is known here."""
        reports = [self._get_heartbeats(n, self._attempt) or [] for n in self.membership.members]
        return max((each["step"] for report in reports for each in report), default=0)

    def _list_reporting_nodes(self) -> list[int]:
        return [n for n, m in self.membership.members.items() if m.place >= 0]

    def _get_heartbeats(self, node: int, attempt: int) -> RankHeartbeats | None:
        """Return the heartbeats of a node; None if it has sent none in this attempt."""
        is_own = node == self.own.node
        report = self._report if is_own else self._reports.get(node)
        if is_own and report is not None and report.heartbeats is None:
            return []
        return report.heartbeats if report is not None and report.attempt == attempt else None

    # --- ranks that are replaced; see `rank_replacement.py` ---

    def report_loss(self, attempt: int, loss: RankLoss) -> None:
        """Tell the leader that ranks are lost."""
        self._own_reports.losses.append((attempt, loss))
        for slot in loss.slots:
            self._own_reports.replacements.get(attempt, {}).pop(slot, None)
        self._send_to_leader(make_loss_message(attempt, loss))

    def take_losses(self, attempt: int) -> list[RankLoss]:
        """Return what was reported since the last call, on the leader."""
        taken = [self._losses.popleft() for _ in range(len(self._losses))]
        return [loss for of_attempt, loss in taken if of_attempt == attempt]

    def report_replacement(self, attempt: int, slot: int, replacement_number: int) -> None:
        """Tell the leader that a replacement of this rank was started, and which one it is."""
        self._own_reports.replacements.setdefault(attempt, {})[slot] = replacement_number
        self._send_to_leader({"replacement": [slot, replacement_number], "attempt": attempt})

    def get_replacements(self, attempt: int) -> dict[int, int]:
        """Return the newest replacement of every rank that had one, on the leader."""
        return dict(self._replacements.get(attempt, {}))

    def discard_replacements(self, attempt: int, slots: Iterable[int]) -> None:
        """On the leader: forget the replacements of ranks whose node is lost or leaves, as they go
        with it."""
        for slot in slots:
            self._replacements.get(attempt, {}).pop(slot, None)

    def announce_round(self, attempt: int, round_: Round) -> None:
        """Tell all nodes which round has begun, from the leader."""
        self._take_round(attempt, round_)
        for node in list(self._reports):  # what they sent before is of the round before
            self._reports[node] = HeartbeatReport(attempt, None)
        self._send_to_all({"round": asdict(round_), "attempt": attempt})

    def find_round(self, attempt: int) -> Round | None:
        """Return the newest round that was announced; None in round 0."""
        return self._rounds.get(attempt)

    def _take_round(self, attempt: int, round_: Round) -> None:
        self._hung_ranks.pop(attempt, None)
        self._rounds[attempt] = round_
        self._own_reports.losses = [
            (of, loss)
            for of, loss in self._own_reports.losses
            if of == attempt and set(loss.slots) & set(round_.slots)
        ]

    # --- nodes that are lost and spares; see `rank_replacement.py` ---

    def set_can_lose_nodes(self, can_lose_nodes: bool) -> None:
        """On the leader: say whether the ranks could go on without a node."""
        with self._lock:
            if self.is_leader and can_lose_nodes != self.membership.can_lose_nodes:
                self._change_membership(
                    replace(self.membership, can_lose_nodes=can_lose_nodes, epoch=-1)
                )

    def take_lost_nodes(self) -> list[LostNode]:
        """Return the nodes that were lost since the last call, on the leader, once a quorum has
        accepted that they are."""
        with self._lock:
            if self._committed.epoch != self.membership.epoch:
                return []
            return [self._lost_nodes.popleft() for _ in range(len(self._lost_nodes))]

    def assign(self, node: int, assignment: SlotAssignment) -> None:
        """On the leader: give the ranks of a lost node to a spare."""
        with self._lock:
            taken = replace(
                self.membership.members[node], place=assignment.place, slots=assignment.slots
            )
            self._change_membership(self.membership.add(taken))
        if self._server is not None:
            self._server.send(node, {"assign": assignment})

    def find_assignment(self) -> SlotAssignment | None:
        """Return the ranks that this spare was given."""
        return self._assignment

    def is_connected(self, node: int) -> bool:
        """Return whether a node is connected to this one; one that has been released stays so until
        its ranks have ended."""
        return self._server is not None and node in self._server.nodes

    def list_free_places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """On the leader: return the places that no node has, each with its slots, once every loss
        of a node was taken."""
        with self._lock:
            return () if self._lost_nodes else self.membership.free_places

    def request_stop(self, reason: str) -> None:
        """On the leader: have all ranks save and end, as at a stop signal."""
        self.stop_reason = self.stop_reason or reason
        self._send_to_all({"stop": reason})

    # --- nodes that leave on purpose; see `rank_replacement.py` ---

    def ask_to_leave(self, node: int, reason: str) -> None:
        """Have a node leave on purpose; any node may ask for it. From a step boundary on the others
        go on without its ranks, which a spare takes over, if there is one. `reason` is shown to
        people: "too slow". While no node can be spared (`membership.can_lose_nodes`), it stays."""
        self._send_to_leader({"ask_to_leave": node, "reason": reason})

    def _mark_leaving(self, node: int, reason: str) -> None:
        with self._lock:
            member = self.membership.members.get(node)
            if member is not None and not member.leaving:
                leaving = replace(member, leaving=reason or "asked to")
                self._change_membership(self.membership.add(leaving))

    def report_notice(self, signal_name: str) -> None:
        """Tell the leader that this node was sent a stop signal. It finds out whether it is a
        notice to this node alone, or to all. To be called again until it has."""
        self._send_to_leader({"notice": signal_name})

    def get_notices(self) -> dict[int, Notice]:
        """Return the nodes that were sent a stop signal, on the leader."""
        return dict(self._notices)

    def release(self, node: int) -> None:
        """On the leader: let a leaving node go, now that the others go on without its ranks."""
        with self._lock:
            self._change_membership(self.membership.remove(node))
        if self._server is not None:
            self._server.send(node, {"released": True})

    def set_wanted_nodes(self, count: int, added: int = 0) -> None:
        """On the leader: say how many nodes are to run ranks, for which so many further places
        are needed."""
        with self._lock:
            known = replace(self.membership, wanted_nodes=count)
            self._change_membership(known.add_places(added) if added else known)

    def reserve_nodes(self, count: int) -> int:
        """On the leader: return the first of so many numbers that no other node will have."""
        with self._lock:
            changed, first = self.membership.reserve_nodes(count)
            self._change_membership(changed)
        return first

    def resign(self) -> bool:
        """On the leader: have another node lead; returns whether there is one that may. Where nodes
        are reached over others it stays: they would all have to find their way anew."""
        server = self._server
        if server is not None and server.peer_count < len(server.nodes):
            return False
        with self._lock:
            known = self.membership
            others = [m for m in known.members.values() if m.node != self.own.node]
            if not any(m.may_lead and m.store and not m.leaving for m in others):
                return False
            self.is_leader, self.is_electing = False, True
            if server is not None:
                server.is_root = False
        self._send_to_all({"resigned": True})
        self._start_election("has resigned", has_resigned=True)
        return True

    def _follow_resignation(self) -> None:
        """The leader lives and has asked for another one."""
        with self._lock:
            connection, self._leader = self._leader, None
            self.is_electing = True
        if connection is not None:
            connection.close()
        self._start_election("has resigned", has_resigned=True)

    def _start_election(self, how: str, has_resigned: bool = False) -> None:
        def elect() -> None:
            before = self.membership
            try:
                self._elect(how, has_resigned)
            except Exception:  # nobody would lead, and all would wait
                traceback.print_exc()
                lost = before.members.get(before.leader) or self._leading_member
                self._end(make_node_lost_failure(lost, how, []))

        _start_election_thread(elect)

    # --- machines that are at fault; see `machine_judge.py` ---

    def report_machine_fault(self, fault: str) -> None:
        """Tell the leader what is wrong with this machine, for a person."""
        self._own_reports.machine_fault = fault
        self._send_to_leader({"machine": fault})

    def get_machine_faults(self) -> dict[str, str]:
        """Return what nodes have reported of their machines, by host, on the leader."""
        return dict(self._machine_faults)

    def count_fault(self, host: str, what: str) -> None:
        """On the leader: keep in mind that a machine was at fault once more."""
        with self._lock:
            faults = (*self.membership.faults, (host, what))
            self._change_membership(replace(self.membership, faults=faults))

    def exclude(self, host: str) -> None:
        """On the leader: do not take a machine back."""
        with self._lock:
            excluded = (*self.membership.excluded_hosts, host)
            self._change_membership(replace(self.membership, excluded_hosts=excluded))

    # --- the end ---

    def report_done(self, attempt: int, code: int) -> None:
        """Tell the leader that all ranks of this node have ended well."""
        self._own_reports.done[attempt] = code
        self._send_to_leader({"done": code, "attempt": attempt})

    def find_end(self, attempt: int) -> int | None:
        """Return the exit code of the world, once the ranks of every node have ended well."""
        done = self._done.get(attempt, {})
        holders = [m.node for m in self.membership.list_nodes_with_ranks()]
        is_end = self.is_leader and attempt not in self._ended and holders
        if is_end and all(node in done for node in holders):
            self._ended[attempt] = max(done.values())
            self._send_to_all({"ended": self._ended[attempt], "attempt": attempt})
        return self._ended.get(attempt)

    def report_ending(self, attempt: int) -> None:
        """Tell all nodes that a rank has ended well. Ranks end together."""
        if attempt not in self._own_reports.ending:
            self._own_reports.ending.add(attempt)
            self._send_to_leader({"ending": attempt})

    def is_ending(self, attempt: int) -> bool:
        """Return whether a rank of any node has ended well."""
        return attempt in self._ending or attempt in self._own_reports.ending

    def announce_over(self, code: int) -> None:
        """On the leader: tell the spares that the run is over."""
        if self.is_leader:
            self.over_code = code
            self._send_to_all({"over": code})

    def send_stack_message(self, message: dict[str, Any]) -> None:
        """Send a message about stacks: the leader to all, the others to the leader."""
        if self.is_leader:
            self._send_to_all({"stacks": message})
        else:
            self._send_to_leader({"stacks": message})

    def leave(self) -> None:
        """Leave, so that nobody takes this node for a lost one. The leader waits until the others
        have left, but not for ever."""
        # First: a connection that closes from now on is not a lost node.
        self._is_over = True
        if (server := self._server) is not None:
            # Those who are reached over this node leave over it, too.
            _wait_until(lambda: not server.nodes, _LEAVE_TIMEOUT_S / (1 if self.is_leader else 2))
        if self._leader is not None:
            self._leader.stop_watching()
            self._leader.send({"bye": True})

    # --- what arrives ---

    def _handle_from_node(self, node: int, message: Message) -> None:
        """Handle a message of a node, on the leader; while this node does not lead, it is one that
        would follow it."""
        if "node" in message:
            if not self.is_leader:
                self._take_vote(node, message)
                return
            self._welcome(node, message)
        elif "knowledge" in message:
            self._take_knowledge(message)
        elif "ask" in message:
            self._send_membership_to(node, message["ask"])
        elif "accepted" in message:
            self._accept(node, int(message["accepted"]))
        elif "member" in message:
            self._add_member(Member.from_fields(message["member"]))
        elif "ask_to_leave" in message:
            self._mark_leaving(int(message["ask_to_leave"]), str(message["reason"]))
        elif "notice" in message:
            self._notices.setdefault(node, Notice(str(message["notice"]), time.monotonic()))
        elif "heartbeats" in message:
            self._reports[node] = HeartbeatReport(message["attempt"], message["heartbeats"])
        elif "failure" in message:
            self.agree_on_failure(message["attempt"], Failure(**message["failure"]))
        elif "lost" in message:
            loss = RankLoss(message["lost"], Failure(**message["cause"]))
            for slot in loss.slots:  # it may have been a replacement, whose offer is void
                self._replacements.get(message["attempt"], {}).pop(slot, None)
            self._losses.append((message["attempt"], loss))
        elif "replacement" in message:
            slot, replacement_number = message["replacement"]
            self._replacements.setdefault(message["attempt"], {})[slot] = replacement_number
        elif "done" in message:
            self._done.setdefault(message["attempt"], {})[node] = int(message["done"])
        elif "ending" in message:
            self._ending.add(message["ending"])
            self._send_to_all(message)
        elif "machine" in message:
            member = self.membership.members.get(node)
            if member is not None:
                self._machine_faults[member.host] = str(message["machine"])
        elif "stacks" in message:
            self.on_stack_message(message["stacks"])
        elif "bye" in message and self._server is not None:
            self._server.drop(node)
            with self._lock:
                self.membership = self.membership.remove(node)
                self._is_unsent = True

    def _take_knowledge(self, message: Message) -> None:
        """Take what a node knows that this one has missed, which is to lead."""
        with self._lock:
            newer = Membership.from_fields(message["knowledge"])
            if not self.is_leader and newer.epoch > self.membership.epoch:
                self.membership = newer
        for attempt, fields in message["rounds"]:
            self._take_newer_round(attempt, Round.from_fields(fields))

    def _take_newer_round(self, attempt: int, newer: Round) -> None:
        """Take a round, unless it is older than the one that is known: a node that has another
        parent may hear of them in another order."""
        known = self._rounds.get(attempt)
        if known is None or newer.number >= known.number:
            self._take_round(attempt, newer)

    def _welcome(self, node: int, message: Message) -> None:
        """Take in a node that has connected."""
        member = Member.from_fields(message["member"])
        with self._lock:
            is_new = node not in self.membership.members
            if is_new and member.host in self.membership.excluded_hosts:
                if self._server is not None:
                    self._server.send(node, {"released": True})
                return
            is_late = member.place >= 0 and is_new
            if is_late and self.membership.can_lose_nodes and self._server is not None:
                self._server.drop(node)  # its ranks count as lost: it has to end
                return
            self._add_member(member)
        for reported in message["state"]:
            self._handle_from_node(node, reported)
        epoch, leader = message["knows"]
        if leader == self.own.node:  # its word of that may have been lost with its relay
            self._accept(node, epoch)
        if self._server is not None and node not in self._votes:
            for decision in self._list_decisions():
                self._server.send(node, decision)
            if not self._is_unsent:
                self._send_membership_to(node, message["knows"])

    def _list_decisions(self) -> list[Message]:
        """Return what this leader has decided, for nodes that may not have heard it."""
        of_attempts: list[tuple[str, dict[int, Any]]] = [
            ("round", {a: asdict(r) for a, r in self._rounds.items()}),
            ("failure", {a: asdict(f) for a, f in self._failures.items()}),
            ("hung", dict(self._hung_ranks)),
            ("ended", dict(self._ended)),
        ]
        return [
            {"leader": asdict(self.own)},
            *({kind: of, "attempt": a} for kind, found in of_attempts for a, of in found.items()),
            *({"ending": attempt} for attempt in list(self._ending)),
            *([{"stop": self.stop_reason}] if self.stop_reason else []),
            *([{"over": self.over_code}] if self.over_code is not None else []),
        ]

    def _handle_from_leader(self, message: Message) -> None:
        """Keep what the leader decided."""
        if "failure" in message:
            self._failures.setdefault(message["attempt"], Failure(**message["failure"]))
        elif "hung" in message:
            self._hung_ranks[message["attempt"]] = HungRank(*message["hung"])
        elif "round" in message:
            self._take_newer_round(message["attempt"], Round.from_fields(message["round"]))
        elif "leader" in message:
            self._leading_member = Member.from_fields(message["leader"])
        elif "membership" in message:
            self._follow(Membership.from_fields(message["membership"]))
        elif "change" in message:
            self._follow_change(message["change"])
        elif "tell" in message:
            self._send_to_leader(self._make_knowledge())
        elif "assign" in message:
            given = SlotAssignment(*message["assign"])
            self._assignment = given._replace(slots=tuple(given.slots))
        elif "stop" in message:
            self.stop_reason = str(message["stop"])
        elif "resigned" in message:
            self._follow_resignation()
        elif "released" in message:
            self.is_released = True
        elif "ended" in message:
            self._ended[message["attempt"]] = int(message["ended"])
        elif "ending" in message:
            self._ending.add(message["ending"])
        elif "over" in message:
            self.over_code = int(message["over"])
        elif "stacks" in message:
            self.on_stack_message(message["stacks"])

    # --- which nodes make up the world ---

    @property
    def committed(self) -> Membership:
        """The newest membership that counts."""
        return self._committed

    def _add_member(self, member: Member) -> None:
        """Take in a node, or what it says of itself. It need not know that it is to leave."""
        with self._lock:
            known = self.membership.members.get(member.node)
            updated = replace(member, leaving=known.leaving if known is not None else "")
            if updated != known:
                self.membership = self.membership.add(updated)
                self._is_unsent = True

    def _change_membership(self, changed: Membership) -> None:
        """Make a membership the newest one, and send it to all at once."""
        self.membership = replace(changed, epoch=self.membership.epoch + 1)
        self._is_unsent = True
        self._send_membership_if_changed()

    def _send_membership_if_changed(self) -> None:
        """Send the membership if it has changed. Joins are sent together, four times a second;
        those of the beginning once all train, since nobody needs them before."""
        with self._lock:
            is_needed = self.membership.can_lose_nodes or self._committed.can_lose_nodes
            if self.is_leader and self._is_unsent and is_needed:
                self._is_unsent = False
                self._send_membership()
                self._commit_if_accepted()

    def _send_membership(self) -> None:
        """Send the membership to all: what has changed since the last one."""
        known = self._sent[-1] if self._sent else None
        self._sent.append(self.membership)
        self._send_to_all(_make_membership_message(self.membership, known))

    def _send_membership_to(self, node: int, knows: list[int]) -> None:
        """Send the membership to a node that has not the newest one, if all others were sent it."""
        known = next((m for m in self._sent if [m.epoch, m.leader] == knows), None)
        if self._server is not None and self._sent and known is not self._sent[-1]:
            self._server.send(node, _make_membership_message(self._sent[-1], known))

    def _accept(self, node: int, epoch: int) -> None:
        with self._lock:
            self._accepted[node] = epoch
            self._accepted_counts[epoch] += 1
            # Counting thousands of nodes for each of them would take too long.
            may_suffice = 2 * self._accepted_counts[epoch] + 2 >= len(self._committed.members)
            if self.is_leader and may_suffice:
                self._commit_if_accepted()

    def _commit_if_accepted(self) -> None:
        if self._committed is self.membership:
            return
        if self._committed.has_quorum(self._list_accepting(self.membership.epoch)):
            self._committed = self.membership

    def _list_accepting(self, epoch: int) -> set[int]:
        """Return the nodes that have accepted a membership, this one among them."""
        with self._lock:
            return {self.own.node, *(n for n, e in self._accepted.items() if e == epoch)}

    def _follow(self, newer: Membership) -> None:
        """Accept a membership of the leader's, or of a node that is to be the leader."""
        with self._lock:
            if newer.epoch <= self.membership.epoch or self._leader is None:
                return
            if self._is_waiting and newer.leader != self.membership.leader:
                self._is_waiting = self.is_electing = False
                self.leader_changes += 1
            self.membership = self._committed = newer
            self._leader.send({"accepted": newer.epoch})

    def _follow_change(self, change: Mapping[str, Any]) -> None:
        """Accept a membership of which only the difference was sent, or ask for all of it."""
        with self._lock:
            newer = self.membership.apply_change(change)
            if newer is not None:
                self._follow(newer)
            elif self._leader is not None and change["rest"]["epoch"] > self.membership.epoch:
                self._leader.send({"ask": [self.membership.epoch, self.membership.leader]})

    def _on_node_lost(self, node: int, how: str) -> None:
        """A node has gone without a goodbye."""
        with self._lock:
            self._votes.pop(node, None)
            member = self.membership.members.get(node)
            if self._is_over or not self.is_leader or member in (None, self.own):
                return
            before = self.membership
            self.membership = before.remove(node)
            present = {self.own.node, *(self._server.nodes if self._server else ())}
            failure = self._make_node_failure(member, how)
            is_spare = member.place < 0
            if not before.can_lose_nodes and not is_spare:
                self.end_every_attempt(failure)
            elif before.can_lose_nodes and not self._committed.has_quorum(present):
                self.is_isolated = True
                self.end_every_attempt(_explain_isolation(failure, self._committed, len(present)))
            else:
                if not is_spare:
                    self._lost_nodes.append(LostNode(member, failure))
                self._is_unsent = True  # it is sent once all losses of this moment are known

    def _make_node_failure(self, member: Member, how: str) -> Failure:
        heartbeats = self._get_heartbeats(member.node, self._attempt) or []
        return make_node_lost_failure(member, how, heartbeats)

    # --- a leader that is lost ---

    def _on_connection_lost(
        self, connection: LeaderConnection, how: str, is_waiting: bool = False
    ) -> None:
        """The leader is lost, or a node that this one would have followed. If `is_waiting`, the
        node over which it was reached lives, and looks for another leader."""
        with self._lock:
            if self._is_over or self.is_released or connection is not self._leader:
                return
            was_waiting, self._is_waiting = self._is_waiting, is_waiting
            self._leader = connection if is_waiting else None
            if self._attempt in self._ended or self.over_code is not None:
                return  # all is done, and the leader has left first
            if self.is_electing and not was_waiting:
                return  # the election goes on with the next node
            before = self.membership
            self.is_electing = before.can_lose_nodes
        if before.leader < 0 or not before.can_lose_nodes:
            first = before.members.get(before.leader) or self._leading_member
            self._end(make_node_lost_failure(first, how, self._report.heartbeats or []))
            return
        if not was_waiting:
            self.on_leader_lost()
        if not is_waiting:
            self._start_election(how)

    def _end(self, failure: Failure) -> None:
        """End without the others. The nodes that are reached over this one look for another way."""
        self._is_over = True
        if self._server is not None:
            self._server.drop_all()
        # The thread of the connections must go on.
        threading.Thread(target=self._on_ended, args=(failure,), daemon=True, name="end").start()

    def _elect(self, how: str, has_resigned: bool = False) -> None:
        """Follow the lowest node that lives, or lead. A leader that has resigned takes part."""
        before = self.membership
        lost = before.members[before.leader]
        others = {n for n in before.members if n != lost.node or has_resigned}
        candidates = [n for n in _list_candidates(before) if n != lost.node]
        for node in candidates if before.has_quorum(others) else ():
            if node == self.own.node:
                if self._try_to_lead(how, has_resigned):
                    return
                break  # the nodes after this one would have come
            if self._try_to_follow(before.members[node]):
                return
            if self.membership.leader == node:  # it led for a moment, and is lost as well
                self._elect(how)
                return
        self.is_isolated = True
        failure = make_node_lost_failure(lost, how, self._report.heartbeats or [])
        self._end(_explain_isolation(failure, before, 1 + len(self._votes)))

    def _try_to_follow(self, candidate: Member) -> bool:
        """Connect to a node and wait until it leads; returns whether it does."""
        try:
            connection = self._open_connection(candidate.lifeline, _CONNECT_TIMEOUT_S)
        except EchelonError:
            return False
        assert self._server is not None
        self._leader = connection
        connection.start(self._server, self.own.node, self._make_introduction)
        leads = _wait_until(
            lambda: self._leader is not connection or self.membership.leader == candidate.node,
            self._silence_s + _ELECTION_SLACK_S,
        )
        with self._lock:
            if leads and self._leader is connection:
                self.leader_changes += 1
                self.is_electing = False
                self._votes.clear()
                return True
            self._leader = None
        connection.close()
        return False

    def _try_to_lead(self, how: str, has_resigned: bool = False) -> bool:
        """Wait for a majority of the nodes, and lead them; returns whether they follow."""
        deadline = time.monotonic() + self._silence_s + _ELECTION_SLACK_S
        late_deadline = math.inf
        if self._server is not None:
            self._server.ask_for_introductions()
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            newest, present = self.membership, {self.own.node, *self._votes}
            if self._ask_for_knowledge() or not newest.has_quorum(present):
                continue
            late_deadline = min(late_deadline, time.monotonic() + _LATE_NODES_S)
            missing = set(newest.members) - present - (set() if has_resigned else {newest.leader})
            if not missing or time.monotonic() > late_deadline:
                return self._lead(newest, present, how)
        return False

    def _ask_for_knowledge(self) -> bool:
        """Ask a node that knows more than this one to tell it; returns whether there is one."""
        for node, vote in list(self._votes.items()):
            rounds = {a: r.number for a, r in self._rounds.items()}
            is_ahead = any(number > rounds.get(a, -1) for a, number in vote["rounds"])
            if is_ahead or vote["knows"][0] > self.membership.epoch:
                now = time.monotonic()
                if self._server is not None and now > vote.get("asked", 0.0) + _ASK_INTERVAL_S:
                    vote["asked"] = now
                    self._server.send(node, {"tell": True})
                return True
        return False

    def _take_vote(self, node: int, message: Message) -> None:
        """A node would follow this one. Where that happens to a node that waits for word of a new
        leader, it is the one that is to lead."""
        if node == self.own.node:
            return
        self._votes[node] = message
        with self._lock:
            is_called = self._is_waiting and not self._is_candidate
            self._is_candidate = self._is_candidate or is_called
        if is_called:
            _start_election_thread(self._lead_while_waiting)

    def _lead_while_waiting(self) -> None:
        self._try_to_lead("is lost")
        self._is_candidate = False

    def _lead(self, before: Membership, present: set[int], how: str) -> bool:
        """Have a quorum accept this node as the leader; returns whether it does."""
        votes = {n: v for n, v in list(self._votes.items()) if n in present}
        here = [Member.from_fields(v["member"]) for v in votes.values()] + [self.own]
        gone = [m for m in before.members.values() if m.node not in present]
        epoch = before.epoch + 1
        with self._lock:
            self._committed = self.membership = before
            for member in gone:
                self.membership = self.membership.remove(member.node)
            for member in here:
                self._add_member(member)
            self.membership = replace(
                self.membership, epoch=epoch, leader=self.own.node, can_lose_nodes=True
            )
            self._is_unsent = False
        self._sent.clear()
        self._sent.append(before)
        self._send_membership()
        if not _wait_until(
            lambda: before.has_quorum(self._list_accepting(epoch)), _ACCEPT_TIMEOUT_S
        ):
            return False
        with self._lock:
            self._committed = self.membership
            for member in gone:
                if member.place >= 0:
                    reason = how if member.node == before.leader else "is gone as well"
                    self._lost_nodes.append(
                        LostNode(member, make_node_lost_failure(member, reason, []))
                    )
            self.is_handed_over = before.leader in present
            self.is_leader, self.is_electing, self._is_waiting = True, False, False
            self.leader_changes += 1
            connection, self._leader = self._leader, None
        if connection is not None:  # to a parent, which follows this node now
            connection.close()
        if self._server is not None:
            self._server.is_root = True
        for message in self._own_reports.to_messages():
            self._handle_from_node(self.own.node, message)
        for node, vote in votes.items():
            self._welcome(node, vote)
        self._votes.clear()
        for decision in self._list_decisions():
            self._send_to_all(decision)
        return True


def _list_candidates(known: Membership) -> list[int]:
    """Return the nodes that may lead, in the order in which they are asked to. A spare does not:
    it has no ranks, and knows of no round; nor does a node of a further job. One that is about to
    leave comes last."""
    candidates = [m for m in known.members.values() if m.may_lead]
    return [m.node for m in sorted(candidates, key=lambda m: (bool(m.leaving), m.node))]


def _explain_isolation(failure: Failure, before: Membership, count: int) -> Failure:
    """Return the failure of a node that must not go on, since others may."""
    have = f"{count} of {len(before.members)} nodes are no majority"
    return replace(failure, summary=f"{failure.summary}; {have}, so this side ends")


def _make_membership_message(newest: Membership, known: Membership | None) -> Message:
    """Return what makes the newest membership of one that others know; all of it, if they know
    none."""
    if known is None:
        return {"membership": newest.to_fields()}
    return {"change": newest.to_change(known)}


def _start_election_thread(target: Callable[[], object]) -> None:
    threading.Thread(target=target, daemon=True, name="election").start()


def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition, at most so long; returns whether it holds."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return condition()
