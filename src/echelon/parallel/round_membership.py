"""A rank's part in the rounds of its world: which one it is in, and how it gets to the next."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from echelon.parallel.process_group import RankGroup
from echelon.parallel.store import PeerFailedError, connect_to_store, read_failure
from echelon.runs.failure import SUPERSEDED_ROUND, Failure
from echelon.runs.heartbeat import Heartbeat
from echelon.utils.sockets import shut_connections_to_port
from echelon.world import World
from echelon.world.rounds import (
    REPLACEMENT_NUMBER_VARIABLE,
    Round,
    RoundStore,
    get_round_prefix,
    read_round_file,
)
from echelon.world.sealed_store import SealedStore

_POLL_S = 0.005
_WATCH_INTERVAL_S = 0.1


class RoundMembership:
    """The rounds of a world as one of its ranks sees them. `world` is that of round 0."""

    def __init__(
        self,
        store: SealedStore,
        world: World,
        env: Mapping[str, str],
        timeout_s: float,
        heartbeat: Heartbeat,
        round_file: Path,
    ) -> None:
        self._store, self.world, self._timeout_s = store, world, timeout_s
        self._address = _normalize_address(world.master or "")
        self._heartbeat, self._round_file = heartbeat, round_file
        self._env = env
        self._attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._rounds = RoundStore(store, self._attempt)
        self._replacement_number = int(env.get(REPLACEMENT_NUMBER_VARIABLE, "0"))
        self._entering = threading.Lock()
        """Held where the round changes, and where the connections of one are ended."""
        self.slot = world.rank
        self.is_confirmed = False
        """Whether this rank trains, and could go on without another one."""
        self.round = Round(0, tuple(range(world.size)))
        threading.Thread(target=self._watch_rounds, daemon=True, name="rounds").start()

    @property
    def is_replacement(self) -> bool:
        """Whether this process takes the place of one that was lost."""
        return self._replacement_number > 0

    @property
    def is_round_planned(self) -> bool:
        """Whether the agents have planned a round that this rank is to join at a step boundary."""
        return self._heartbeat.planned_round > self.round.number

    def confirm_round(self) -> None:
        """Say that this rank trains in the current round, and could go on without another one."""
        self._rounds.count_member(self.round.number)
        self.is_confirmed = True

    def end_round(self) -> None:
        """Say that this rank has made all steps."""
        self._rounds.count_ended(self.round)

    def have_all_ended(self, limit_s: float) -> bool:
        """Return whether all ranks of the current round have made all steps. Where one is still
        missing, wait, not for ever, until it has or a round without it begins."""
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(dist.DistError):  # then another leader follows with a new round
            while not self._rounds.have_all_ended(self.round):
                if time.monotonic() > deadline or self._read_newer_round() is not None:
                    return False
                time.sleep(_POLL_S)
            return True
        return False

    def publish_failure(self, failure: Failure) -> None:
        """Publish a failure in the current round, for a rank whose group has no store."""
        prefix = get_round_prefix(self._attempt, self.round.number)
        store = self._store.open_prefix(prefix)
        with contextlib.suppress(Exception):  # if the agent is gone, nobody is left to read it
            store.compare_set("failure", "", failure.to_json())

    def report_transient(self, failure: Failure) -> None:
        """Say why this rank ends alone, for the agent that replaces it."""
        with contextlib.suppress(dist.DistError):  # the exit code says enough
            self._rounds.report_transient(self.slot, failure.to_json())

    def wait_as_replacement(self) -> RankGroup:
        """Say that this process is ready, and return the group of the round that it belongs to."""
        offered_at = ""
        while True:
            newest = self._read_newer_round()
            if newest is not None and self.slot in newest.slots:
                with contextlib.suppress(dist.DistError, OSError):
                    return self._enter(newest)
            with contextlib.suppress(dist.DistError, OSError):  # another store follows a lost one
                if newest is not None:
                    self._use_store_of(newest)
                if offered_at != self._address:
                    self._rounds.offer_replacement(self.slot, self._replacement_number)
                    offered_at = self._address
            time.sleep(_POLL_S)

    def wait_for_next_round(self, group: RankGroup, timeout_s: float) -> RankGroup | None:
        """Return the group of the round after the current one; None where none begins in time, or
        goes on without this rank. Raises PeerFailedError where the world has failed instead."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            newest = self._read_newer_round()
            if newest is not None and self.slot not in newest.slots:
                return None
            failure = None
            if newest is not None:
                # Its store may be lost as well: then one more round follows.
                with contextlib.suppress(dist.DistError, OSError):
                    return self._enter(newest)
            with contextlib.suppress(dist.DistError):  # the next round has another store
                failure = None if group.store is None else read_failure(group.store)
            if failure is not None and failure.summary != SUPERSEDED_ROUND:
                raise PeerFailedError(failure)
            time.sleep(_POLL_S)
        return None

    @property
    def is_left_out(self) -> bool:
        """Whether the newest round goes on without this rank, as its node leaves on purpose."""
        newest = self._read_newer_round()
        return newest is not None and self.slot not in newest.slots

    def _read_newer_round(self) -> Round | None:
        """Return the newest round if this rank is not in it yet."""
        heartbeat = self._heartbeat
        if max(heartbeat.planned_round, heartbeat.unplanned_round) <= self.round.number:
            return None
        newest = read_round_file(self._round_file, self._attempt)
        return newest if newest is not None and newest.number > self.round.number else None

    def _use_store_of(self, newest: Round) -> None:
        """Go over to the store of a round, if it is another one."""
        address = _normalize_address(newest.store)
        if address != self._address:
            self._store = SealedStore.open(connect_to_store(address, self._timeout_s), self._env)
            self._address = address
            self._rounds = RoundStore(self._store, self._attempt)

    def _enter(self, newest: Round) -> RankGroup:
        self._use_store_of(newest)
        with self._entering:
            self.round = newest
        world = newest.place(self.world, self.slot)
        if world.size == 1:
            return RankGroup(world, None, False, self._timeout_s)
        prefix = get_round_prefix(self._attempt, newest.number)
        return RankGroup(world, self._store.open_prefix(prefix), False, self._timeout_s)

    def _watch_rounds(self) -> None:
        """End the collectives of a round that is over. Where a machine has fallen silent, its
        connections stay open, and the others would wait in them."""
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            current = self.round.number
            if self._heartbeat.unplanned_round > current:
                self._interrupt(current)
                newest = self._read_newer_round()
                if newest is not None and _normalize_address(newest.store) != self._address:
                    shut_connections_to_port(int(self._address.rpartition(":")[2]))
                # Again and again: the process group may have been about to open.
                while self._interrupt(current):
                    time.sleep(_WATCH_INTERVAL_S)

    def _interrupt(self, number: int) -> bool:
        """End the collectives of a round, and not those of the next; returns whether this rank is
        still in it."""
        with self._entering:
            if self.round.number != number:
                return False
            RankGroup.interrupt_process_group()
            return True


def _normalize_address(address: str) -> str:
    """Return HOST:PORT without the brackets that IPv6 addresses may have."""
    host, _, port = address.rpartition(":")
    return f"{host.strip('[]')}:{port}"
