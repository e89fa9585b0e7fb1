"""Lost ranks are replaced inside an attempt, while the others go on.

The agent of a node reports its lost ranks over the lifeline. Node 0's agent decides which round
follows (`round_keeper.py`), publishes it in the store, where ranks look, and announces it to all
agents. The agent of the lost rank starts a replacement, which builds its experiment and then waits
in the store; as soon as it does, node 0 plans a round with all ranks again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import replace

from echelon.errors import ExitCode
from echelon.launch.node.lifeline import Lifeline, RankLoss
from echelon.launch.node.round_keeper import RoundKeeper
from echelon.launch.node.round_recorder import RoundRecorder
from echelon.launch.plan import NodeSpec
from echelon.runs.failure import SUPERSEDED_ROUND, Failure
from echelon.runs.run_folder import Run
from echelon.world.rounds import Round, RoundStore, get_round_prefix
from echelon.world.sealed_store import SealedStore


class RankReplacement:
    """One node's part in the rounds of an attempt."""

    def __init__(
        self,
        lifeline: Lifeline,
        store: SealedStore,
        node: NodeSpec,
        attempt: int,
        max_losses: int,
        run: Run,
    ) -> None:
        self._lifeline, self._store, self._attempt = lifeline, store, attempt
        self._rounds = RoundStore(store, attempt)
        world_size = node.node_count * node.procs
        self.round = self._first_round = Round(0, tuple(range(world_size)))
        """The newest one that this agent knows."""
        self._known_rounds = [self.round]
        self._max_losses = max_losses
        self._failed_joins: dict[int, int] = {}
        """Slot → how many of its replacements in a row were lost before they joined. One that
        computes wrong numbers, as the process before it did, counts as many as there may be."""
        self._keeper = RoundKeeper(world_size, max_losses) if node.rank == 0 else None
        self._recorder = RoundRecorder(run, time.monotonic())
        self._incarnations: dict[int, int] = {}
        self._started_in: dict[int, int] = {}
        """Slot → the number of the round in which its newest replacement was started."""
        self._open_prefixes = [self.prefix]

    @property
    def prefix(self) -> str:
        """The prefix of the current round's keys in the store."""
        return get_round_prefix(self._attempt, self.round.number)

    def can_replace(self) -> bool:
        """Return whether the ranks could go on without one of them: all have begun to train, in a
        way that allows it, and none has failed by an error that the others would meet too."""
        is_open = self._rounds.is_formed(self._first_round) and self.read_failure() is None
        return is_open and not self.have_all_ended()

    def have_all_ended(self) -> bool:
        """Return whether all ranks of the current round have made all steps."""
        return self._rounds.have_all_ended(self.round)

    def read_failure(self) -> Failure | None:
        """Return the failure that a rank has published, in whatever round it was."""
        for round_ in reversed(self._known_rounds):
            prefix = get_round_prefix(self._attempt, round_.number)
            store = self._store.open_prefix(prefix)
            if store.check(["failure"]):
                failure = Failure.from_json(store.get("failure"))
                if failure.summary != SUPERSEDED_ROUND:
                    return failure
        return None

    def report_loss(self, slot: int, failure: Failure) -> None:
        """Tell node 0 that a rank of this node is lost."""
        # A loop of the user's own is begun in a round, and may fail before that round is formed.
        is_member = slot in self.round.slots and self.has_joined(slot)
        self._failed_joins[slot] = 0 if is_member else self._failed_joins.get(slot, 0) + 1
        if failure.exit == ExitCode.WRONG_NUMBERS and self._incarnations.get(slot):
            self._failed_joins[slot] = self._max_losses  # it is not the process that is at fault
        if self._failed_joins[slot] == self._max_losses:
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
        return slot not in self.round.slots and failed_joins < self._max_losses

    def has_joined(self, slot: int) -> bool:
        """Return whether the newest process of a slot of this node has trained with others."""
        if (started_in := self._started_in.get(slot)) is None:
            return True
        joined = [r for r in self._known_rounds if r.number > started_in and slot in r.slots]
        return any(self._rounds.is_formed(r) for r in joined)

    def begin_incarnation(self, slot: int) -> int:
        """Return how many processes this slot has had before the one that is started now."""
        self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        self._started_in[slot] = self.round.number
        self._lifeline.report_replacement(self._attempt, slot, self._incarnations[slot])
        return self._incarnations[slot]

    def advance(self, step: int, done_slots: Collection[int]) -> Round | None:
        """Decide, on node 0, what follows from losses and replacements; return a round that is new
        to this node, if there is one."""
        if self._keeper is not None:
            unformed = self._recorder.unformed
            is_formed = unformed is not None and self._rounds.is_formed(unformed)
            self._recorder.observe(step, is_formed, time.monotonic())
            self._decide(self._keeper, step, done_slots)
        newest = self._lifeline.find_round(self._attempt)
        if newest is None or newest.number <= self.round.number:
            return None
        self.round = newest
        self._known_rounds.append(newest)
        return newest

    def close(self) -> None:
        """Write down what is left to say of rounds, when the attempt has ended."""
        self._recorder.close(time.monotonic())

    def _decide(self, keeper: RoundKeeper, step: int, done_slots: Collection[int]) -> None:
        losses = self._lifeline.take_losses(self._attempt)
        if losses:
            known = keeper.current
            slots = {slot for loss in losses for slot in loss.slots}
            reason = "; ".join(describe_loss(loss.failure) for loss in losses)
            decided = keeper.lose(slots, done_slots, step, reason)
            if decided is None:
                self._lifeline.agree_on_failure(self._attempt, self._explain_end(losses[0].failure))
            elif decided is not known:
                self._begin(decided)
                hosts = [loss.failure.host for loss in losses]
                self._recorder.begin(decided, slots, (), time.monotonic(), hosts)
        waiting = [
            slot
            for slot, incarnation in self._lifeline.get_replacements(self._attempt).items()
            if slot in keeper.absent and self._rounds.has_offer(slot, incarnation)
        ]
        # Not before all are in the current round: a rank on its way there would skip it.
        if waiting and self._rounds.is_formed(keeper.current):
            planned = keeper.take_back(waiting)
            self._begin(planned)
            self._recorder.begin(planned, (), waiting, time.monotonic())

    def _begin(self, decided: Round) -> None:
        """Publish a round to ranks and agents. Ranks that wait for others in an earlier round do so
        in vain, and are told."""
        self._rounds.publish(decided)
        if not decided.is_planned:
            note = Failure(0, "", None, SUPERSEDED_ROUND, "")
            for prefix in self._open_prefixes:
                self._store.open_prefix(prefix).compare_set("failure", "", note.to_json())
            self._open_prefixes.clear()
        self._open_prefixes.append(get_round_prefix(self._attempt, decided.number))
        self._lifeline.announce_round(self._attempt, decided)

    def _explain_end(self, failure: Failure) -> Failure:
        assert self._keeper is not None
        if not self._keeper.has_given_up:
            return failure
        times = f"{self._keeper.max_losses} losses before it without a step between them"
        limit = f"launch.max_replacements={self._keeper.max_losses}"
        return replace(failure, summary=f"{failure.summary}, after {times} ({limit})")


def describe_loss(failure: Failure) -> str:
    """One sentence about a rank that is lost while the others go on."""
    at = "before its first step" if failure.step is None else f"after step {failure.step}"
    return f"lost rank {failure.rank} on {failure.host} {at}: {failure.summary}"
