"""Lost ranks and nodes are replaced inside an attempt, while the others go on.

The agent of a node reports its lost ranks over the lifeline. The agent that leads decides which
round follows (`round_keeper.py`) and announces it to all agents, who write it down for their ranks.
The agent of the lost rank starts a replacement, which builds its experiment and then waits in the
store; as soon as it does, the leader plans a round with all ranks again.

A lost node is the loss of all its ranks. The leader gives them to a spare, whose agent starts their
replacements; without a spare the others go on alone.

A node that leaves on purpose finishes its step: the leader plans a round without its ranks, and
lets it go once that round is formed. Nodes leave one after another, so that a state that the ranks
hold together is never on leaving ones alone. A leader that is to leave resigns before.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from echelon.errors import ExitCode
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.machine_judge import MachineJudge
from echelon.launch.node.membership import Member
from echelon.launch.node.node_reports import LostNode, RankLoss, SlotAssignment
from echelon.launch.node.round_keeper import RoundKeeper
from echelon.launch.node.round_recorder import RoundRecorder
from echelon.runs.failure import SUPERSEDED_ROUND, Failure
from echelon.runs.run_folder import Run
from echelon.utils.files import write_json_atomically
from echelon.world.rounds import (
    SLOW_MACHINE_KEY,
    Round,
    RoundStore,
    SlowMachine,
    format_slots,
    get_round_prefix,
)
from echelon.world.sealed_store import SealedStore

_REPLACEMENTS_PER_EPOCH = 1000
_NOTICE_WINDOW_S = 3.0
"""Within so long a stop signal to the whole run has reached all of its nodes. Were it later, nodes
would leave one by one, and the last ones would save and end."""
_SLOW_INTERVAL_S = 1.0
_BEGIN_WAIT_S = 10.0
_POLL_S = 0.02
_SHARED_KEYS = ("config",)
"""Of round 0: what a replacement compares itself with."""


@dataclass(frozen=True)
class WorldStore:
    """The store of the leader, or of this node should it lead."""

    client: SealedStore
    address: str
    """HOST:PORT, as all nodes reach it."""


@dataclass(frozen=True)
class ReplacementLimits:
    """When the others do not go on."""

    max_losses: int
    """So many losses in a row without a step between are survived."""
    min_nodes: int = 1
    """With fewer nodes the run saves and ends."""
    max_node_faults: int = 0
    """A machine that was at fault so many times more than any other is left out; 0: never."""


class RankReplacement:
    """One node's part in the rounds of an attempt."""

    def __init__(
        self,
        lifeline: Lifeline,
        store: WorldStore,
        world_size: int,
        attempt: int,
        limits: ReplacementLimits,
        run: Run,
        judge: MachineJudge,
        first_replacement_number: int = 0,
    ) -> None:
        self._lifeline, self._store, self._attempt = lifeline, store, attempt
        self._rounds = RoundStore(store.client, attempt)
        self._world_size, self._limits, self._run = world_size, limits, run
        self._judge, self._next_slow_s = judge, 0.0
        self.round = self._first_round = Round(0, tuple(range(world_size)))
        """The newest one that this agent knows."""
        self._is_first_formed = first_replacement_number > 0
        self._known_rounds = [self.round]
        self._failed_joins: dict[int, int] = {}
        """Slot → how many of its replacements in a row were lost before they joined. One that
        computes wrong numbers, as the process before it did, counts as many as there may be."""
        self._keeper: RoundKeeper | None = None
        """Present on the node that leads."""
        self._formed_number = -1
        """Of a round that is known to be formed, though the store does not know it."""
        self._ending_nodes: set[int] = set()
        """Nodes that were released, and whose ranks have yet to end."""
        self._recorder = RoundRecorder(run, time.monotonic())
        self._first_replacement_number = first_replacement_number
        self._replacement_numbers: dict[int, int] = {}
        self._started_in: dict[int, int] = {}
        """Slot → the number of the round in which its newest replacement was started."""
        self._open_prefixes = [self.prefix]

    @property
    def prefix(self) -> str:
        """The prefix of the current round's keys in the store."""
        return get_round_prefix(self._attempt, self.round.number)

    def use_store(self, store: WorldStore) -> None:
        """Go on with the store of another leader. It knows nothing of the rounds before."""
        self._store, self._rounds = store, RoundStore(store.client, self._attempt)
        self._open_prefixes = [self.prefix]

    def copy_shared_keys(self, standby: SealedStore) -> None:
        """Copy what replacements need to a store that may have to take over."""
        prefix = get_round_prefix(self._attempt, 0)
        source = self._store.client.open_prefix(prefix)
        for key in _SHARED_KEYS:
            if source.check([key]):
                standby.open_prefix(prefix).set(key, source.get(key))

    def can_replace(self) -> bool:
        """Return whether the ranks could go on without one of them: all have begun to train, in a
        way that allows it, and none has failed by an error that the others would meet too."""
        if not self._is_first_formed:
            self._is_first_formed = self._rounds.is_formed(self._first_round)
        is_open = self._is_first_formed and self.read_failure() is None
        return is_open and not self.have_all_ended()

    def wait_until_begun(self) -> None:
        """Wait, not for long, until all ranks train, where the first ones do: a rank may be lost in
        its first step while others are about to begin it."""
        deadline = time.monotonic() + _BEGIN_WAIT_S
        while self._rounds.is_forming(self._first_round) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def have_all_ended(self) -> bool:
        """Return whether all ranks of the current round have made all steps."""
        return self._rounds.have_all_ended(self.round)

    def read_failure(self) -> Failure | None:
        """Return the failure that a rank has published, in whatever round it was."""
        for round_ in reversed(self._known_rounds):
            prefix = get_round_prefix(self._attempt, round_.number)
            store = self._store.client.open_prefix(prefix)
            if store.check(["failure"]):
                failure = Failure.from_json(store.get("failure"))
                if failure.summary != SUPERSEDED_ROUND:
                    return failure
        return None

    def report_loss(self, slot: int, failure: Failure) -> None:
        """Tell the leader that a rank of this node is lost."""
        # A loop of the user's own is begun in a round, and may fail before that round is formed.
        is_member = slot in self.round.slots and self.has_joined(slot)
        self._failed_joins[slot] = 0 if is_member else self._failed_joins.get(slot, 0) + 1
        if failure.exit == ExitCode.WRONG_NUMBERS and self._replacement_numbers.get(slot):
            self._failed_joins[slot] = (
                self._limits.max_losses
            )  # it is not the process that is at fault
        if self._failed_joins[slot] == self._limits.max_losses:
            what = f"rank {slot} could not be replaced: {failure.summary}"
            print(f"warning: {what}; going on without it", file=sys.stderr, flush=True)
        self._lifeline.report_loss(self._attempt, RankLoss([slot], failure))

    def read_transient(self, slot: int) -> Failure | None:
        """Return the failure of a rank that ended alone, to be replaced."""
        text = self._rounds.read_transient(slot)
        return None if text is None else Failure.from_json(text)

    def may_start(self, slot: int) -> bool:
        """Return whether a replacement of a lost rank may be started: the others go on without it,
        and not too many were lost before they joined."""
        failed_joins = self._failed_joins.get(slot, 0)
        return slot not in self.round.slots and failed_joins < self._limits.max_losses

    def has_joined(self, slot: int) -> bool:
        """Return whether the newest process of a slot of this node has trained with others."""
        if (started_in := self._started_in.get(slot)) is None:
            return True
        joined = [r for r in self._known_rounds if r.number > started_in and slot in r.slots]
        return any(self._rounds.is_formed(r) for r in joined)

    def number_replacement(self, slot: int) -> int:
        """Return how many processes this slot has had before the one that is started now."""
        self._replacement_numbers[slot] = (
            self._replacement_numbers.get(slot, self._first_replacement_number) + 1
        )
        self._started_in[slot] = self.round.number
        self._lifeline.report_replacement(self._attempt, slot, self._replacement_numbers[slot])
        return self._replacement_numbers[slot]

    def advance(self, step: int, done_slots: Collection[int]) -> Round | None:
        """Decide, on the node that leads, what follows from losses and replacements; return a round
        that is new to this node, if there is one."""
        if self._lifeline.is_leader:
            unformed = self._recorder.unformed
            is_formed = unformed is not None and self._rounds.is_formed(unformed)
            self._recorder.observe(step, is_formed, time.monotonic())
            self._decide(self._get_keeper(), step, done_slots)
        newest = self._lifeline.find_round(self._attempt)
        if newest is None or newest.number <= self.round.number:
            return None
        self.round = newest
        self._known_rounds.append(newest)
        return newest

    def close(self) -> None:
        """Write down what is left to say of rounds, when the attempt has ended."""
        self._recorder.close(time.monotonic())

    def _get_keeper(self) -> RoundKeeper:
        if self._keeper is None:
            newest = self._lifeline.find_round(self._attempt) or self._first_round
            self._keeper = RoundKeeper(self._world_size, self._limits.max_losses, newest)
            if self._lifeline.is_handed_over:  # a leader resigns in a round that is formed
                self._formed_number = newest.number
        return self._keeper

    def _decide(self, keeper: RoundKeeper, step: int, done_slots: Collection[int]) -> None:
        losses = self._lifeline.take_losses(self._attempt)
        lost_nodes = self._lifeline.take_lost_nodes()
        if lost_nodes and not self._may_lose_nodes(lost_nodes):
            return
        for lost in lost_nodes:
            self._lifeline.discard_replacements(self._attempt, lost.member.slots)
            losses.append(RankLoss(list(lost.member.slots), lost.failure))
        # First: an agent must know that it leaves before it may start a replacement.
        self._judge.count_losses(losses, keeper.current.slots)
        can_lose_nodes = self._lifeline.membership.can_lose_nodes
        self._judge.judge_all(step, can_lose_nodes, self._read_slow_machine())
        if losses:
            self._formed_number = -1
            known = keeper.current
            slots = {slot for loss in losses for slot in loss.slots}
            if slots & set(known.slots) and not self._rounds.supersede(known.number):
                return  # all have made all steps, and miss nobody
            reason = "; ".join(describe_loss(loss.failure) for loss in losses)
            decided = keeper.lose(slots, done_slots, step, reason)
            if decided is None:
                cause = self._explain_end(keeper, losses[0].failure)
                self._lifeline.agree_on_failure(self._attempt, cause)
                return
            if decided is not known:
                self._begin(decided)
                hosts = [loss.failure.host for loss in losses]
                self._recorder.begin(decided, slots, (), time.monotonic(), hosts)
        self._fill_free_places(keeper)
        self._stop_below_minimum(bool(lost_nodes))
        self._answer_notices()
        if self._is_formed(keeper.current):
            self._release_leaving_nodes(keeper)
        if not self._lifeline.is_leader:
            return  # it has resigned
        members = self._lifeline.membership.members.values()
        leaving = {slot for member in members if member.leaving for slot in member.slots}
        waiting = [
            slot
            for slot, replacement_number in self._lifeline.get_replacements(self._attempt).items()
            if slot not in keeper.current.slots
            and slot not in leaving
            and self._rounds.has_offer(slot, replacement_number)
        ]
        # Not before all are in the current round: a rank on its way there would skip it.
        if waiting and self._is_formed(keeper.current):
            planned = keeper.plan_with(waiting)
            self._begin(planned)
            self._recorder.begin(planned, (), waiting, time.monotonic())

    def _read_slow_machine(self) -> SlowMachine | None:
        """Return the machine that the ranks of this round have waited for too long, if there is
        one."""
        if time.monotonic() < self._next_slow_s:
            return None
        self._next_slow_s = time.monotonic() + _SLOW_INTERVAL_S
        store = self._store.client.open_prefix(self.prefix)
        if not store.check([SLOW_MACHINE_KEY]):
            return None
        return SlowMachine.from_json(store.get(SLOW_MACHINE_KEY))

    def _begin(self, decided: Round) -> None:
        """Publish a round to ranks and agents. Ranks that wait for others in an earlier round do so
        in vain, and are told."""
        if not decided.is_planned:
            note = Failure(0, "", None, SUPERSEDED_ROUND, "")
            for prefix in self._open_prefixes:
                store = self._store.client.open_prefix(prefix)
                store.compare_set("failure", "", note.to_json())
            self._open_prefixes.clear()
        self._open_prefixes.append(get_round_prefix(self._attempt, decided.number))
        self._lifeline.announce_round(self._attempt, replace(decided, store=self._store.address))

    def _explain_end(self, keeper: RoundKeeper, failure: Failure) -> Failure:
        if not keeper.has_given_up:
            return failure
        times = f"{keeper.max_losses} losses before it without a step between them"
        limit = f"launch.max_replacements={keeper.max_losses}"
        return replace(failure, summary=f"{failure.summary}, after {times} ({limit})")

    # --- lost nodes, on the leader ---

    def _may_lose_nodes(self, lost_nodes: list[LostNode]) -> bool:
        """Return whether the others go on without these nodes. Otherwise nobody does, or all ranks
        have ended and nobody has to."""
        self._write_membership()
        if self.have_all_ended():
            return False
        is_cancelled = self._run.cancel_file.exists()  # `--now` kills node 0's agent
        if self.can_replace() and not is_cancelled:
            return True
        self._lifeline.end_every_attempt(lost_nodes[0].failure)
        return False

    def _write_membership(self) -> None:
        """Write which nodes go on, also for a node that was cut off: it ends, and must not write
        that the run has failed."""
        known = self._lifeline.membership
        hosts = [m.host for m in known.members.values()]
        leader = known.members[known.leader].host
        about = {
            "epoch": known.epoch,
            "leader": leader,
            "nodes": [*known.members],
            "hosts": hosts,
            "ending_nodes": sorted(self._ending_nodes),
            "lost_hosts": known.lost_hosts,
        }
        with contextlib.suppress(OSError):  # the disk may be full
            # Not into the status, which rank 0 may be writing now.
            write_json_atomically(self._run.membership_file, about)

    def _fill_free_places(self, keeper: RoundKeeper) -> None:
        """Give the ranks of nodes that are gone to spares."""
        for place, slots in self._lifeline.list_free_places():
            known = self._lifeline.membership
            staying = [m for m in known.list_nodes_with_ranks() if not m.leaving]
            is_full = 0 < known.wanted_nodes <= len(staying)
            if is_full or set(slots) & set(keeper.current.slots):
                continue
            if (spare := known.find_spare(len(slots))) is None:
                continue
            first = known.epoch * _REPLACEMENTS_PER_EPOCH
            print(f"{spare.host} takes over {format_slots(slots)}", file=sys.stderr, flush=True)
            self._lifeline.assign(
                spare.node, SlotAssignment(self._attempt, place, slots, self._world_size, first)
            )

    def _stop_below_minimum(self, has_lost_nodes: bool) -> None:
        count = len(self._lifeline.membership.list_nodes_with_ranks())
        if has_lost_nodes and count < self._limits.min_nodes:
            least = f"launch.min_nodes={self._limits.min_nodes}"
            self._lifeline.request_stop(f"{count} nodes are left, and {least}: saving and ending")

    # --- nodes that leave on purpose, on the leader ---

    def _is_formed(self, round_: Round) -> bool:
        return round_.number == self._formed_number or self._rounds.is_formed(round_)

    def _answer_notices(self) -> None:
        """Decide what a stop signal means that came to nodes. Whoever ends a run signals all nodes
        that it was started with; a signal to some is a notice that they are about to go."""
        lifeline = self._lifeline
        members, notices = lifeline.membership.members, lifeline.get_notices()
        pending = {n: e for n, e in notices.items() if n in members and not members[n].leaving}
        if not pending or lifeline.stop_reason:
            return
        signal_name = next(iter(pending.values())).signal
        spared = [
            m
            for m in members.values()
            if m.slots and not m.leaving and not m.is_added and m.node not in notices
        ]
        if not spared:
            lifeline.request_stop(f"all nodes were sent {signal_name}: saving and ending")
            return
        waited_s = time.monotonic() - min(e.since_s for e in pending.values())
        for node, notice in pending.items():
            # A signal to a further job never means the run.
            if waited_s > _NOTICE_WINDOW_S or members[node].is_added:
                lifeline.ask_to_leave(node, f"it was sent {notice.signal}")

    def _release_leaving_nodes(self, keeper: RoundKeeper) -> None:
        """Release nodes without whose ranks the others have gone on, and plan the round without
        those of the next one."""
        lifeline, current = self._lifeline, set(keeper.current.slots)
        if ended := [n for n in self._ending_nodes if not lifeline.is_connected(n)]:
            self._ending_nodes.difference_update(ended)
            self._write_membership()
        leaving = [m for _, m in sorted(lifeline.membership.members.items()) if m.leaving]
        others = [m for m in leaving if m.node != lifeline.own.node]
        # The store of a leader that has resigned serves the round in which it did.
        serving = [m for m in others if self._serves_round(m)]
        for member in others:
            if not current & set(member.slots) and member not in serving:
                lifeline.discard_replacements(self._attempt, member.slots)
                lifeline.release(member.node)
                self._ending_nodes.add(member.node)
                self._write_membership()
        holders = [m for m in others if current & set(m.slots)] or serving
        if not leaving or lifeline.stop_reason or not self.can_replace():
            return
        staying = [m for m in lifeline.membership.list_nodes_with_ranks() if not m.leaving]
        spares = [m for m in lifeline.membership.members.values() if m.is_spare]
        if not staying or len(staying) + len(spares) < self._limits.min_nodes:
            self._request_stop_for(leaving[0], len(staying))
        elif holders:
            planned = keeper.plan_without(holders[0].slots, _describe_leaving(holders[0]))
            assert planned is not None  # somebody stays
            lifeline.discard_replacements(self._attempt, holders[0].slots)  # it may be one itself
            self._begin(planned)
            self._recorder.begin(planned, (), (), time.monotonic(), left=holders[0].slots)
        elif len(others) < len(leaving) and lifeline.resign():  # only the leader is left to leave
            self._recorder.close(time.monotonic())

    def _serves_round(self, member: Member) -> bool:
        """Return whether the ranks use the store of this node; in round 0 it is node 0's."""
        newest = self._lifeline.find_round(self._attempt)
        return member.node == 0 if newest is None else member.store == newest.store

    def _request_stop_for(self, leaving: Member, count: int) -> None:
        least = f"launch.min_nodes={self._limits.min_nodes}"
        left = f"{count} node{'s' * (count != 1)} would be left, and {least}"
        self._lifeline.request_stop(f"{_describe_leaving(leaving)}; {left}: saving and ending")


def _describe_leaving(member: Member) -> str:
    """`left: node 2 (c, ranks 4, 5): the partition is needed`."""
    ranks = f", {format_slots(member.slots)}" if member.slots else ""
    return f"left: node {member.node} ({member.host}{ranks}): {member.leaving}"


def describe_loss(failure: Failure) -> str:
    """One sentence about a rank or a node that is lost while the others go on."""
    at = "before its first step" if failure.step is None else f"after step {failure.step}"
    if failure.exit == ExitCode.NODE_LOST:  # a new leader does not know its step
        when = "" if failure.step is None else f" {at}"
        return f"lost a node{when}: {failure.summary}"
    return f"lost rank {failure.rank} on {failure.host} {at}: {failure.summary}"
