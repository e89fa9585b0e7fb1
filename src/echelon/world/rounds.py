"""Rounds: which ranks make up a world, from one loss or return of a rank to the next.

A world begins with round 0, in which every rank takes part. When a rank is lost the others go on in
the next round, with new numbers; when its replacement is ready, one more round has all of them
again. The agent that leads decides on rounds; every agent writes them into a file for its ranks.
What ranks and agents of a round tell each other is in the store that the round names: that of the
leader, which may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.utils.files import read_json_object, write_json_atomically
from echelon.world.sealed_store import SealedStore
from echelon.world.types import World

REPLACEMENT_NUMBER_VARIABLE = "ECHELON_REPLACEMENT_NUMBER"
"""Set for a process that replaces a lost rank: how many processes its slot has had before."""

AGENT_STOPS_VARIABLE = "ECHELON_AGENT_STOPS"
"""Set for ranks of a node that leaves by itself when its job is stopped. Slurm then signals every
process of it, so they hear of a stop of the run from their agent alone, by SIGINT."""


@dataclass(frozen=True)
class Round:
    """The ranks of a world for a while."""

    number: int
    slots: tuple[int, ...]
    """The ranks that they had in round 0, in the order of their ranks in this one."""
    is_planned: bool = False
    """Whether the ranks go over to it at a step boundary. Otherwise a rank was lost, and nobody can
    finish a step of the round before."""
    reason: str = ""
    """Why it began, for a person."""
    store: str = ""
    """HOST:PORT of the store that its ranks use."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Round:
        """Return the round with the fields that `asdict` made of it."""
        return cls(**fields | {"slots": tuple(fields["slots"])})

    def place(self, world: World, slot: int) -> World:
        """Return the place of the rank with this slot, which had `world` in another round."""
        master = self.store or world.master
        return replace(world, rank=self.slots.index(slot), size=len(self.slots), master=master)


def write_round_file(file: Path, attempt: int, round_: Round) -> None:
    """Tell the ranks of a node which round is the newest one."""
    write_json_atomically(file, {"attempt": attempt, "round": asdict(round_)})


def read_round_file(file: Path, attempt: int) -> Round | None:
    """Return the newest round of an attempt; None in round 0."""
    found = read_json_object(file)
    if found is None or found.get("attempt") != attempt:
        return None
    return Round.from_fields(found["round"])


def get_round_prefix(attempt: int | str, number: int) -> str:
    """Return the prefix of all keys of a round, so that none finds those of another."""
    return f"echelon/{attempt}" if number == 0 else f"echelon/{attempt}.{number}"


_ENDED, _SUPERSEDED = "ended", "superseded"
"""How a round is over, which is said once."""
SLOW_MACHINE_KEY = "slow machine"
"""Of a round: what its rank 0 has found."""


class SlowMachine(NamedTuple):
    """A machine that the ranks of the other machines have waited for, for a while."""

    host: str
    rank: int
    """Its slowest one, in the round in which it was found."""
    factor: float
    """The time of that as a multiple of the median of the other machines."""
    slow_s: float

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> SlowMachine:
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return f"{self.factor:.3g} × the time of the others for {self.slow_s:.0f} s"


class RoundStore:
    """What the agents and ranks of one attempt tell each other about rounds, in their store."""

    def __init__(self, store: SealedStore, attempt: int | str) -> None:
        self._store = store
        self._prefix = f"rounds/{attempt}"

    def count_member(self, number: int) -> None:
        """Note that this rank trains in the round with this number, and could go on without another
        one."""
        self._store.add(self._get_members_key(number), 1)

    def count_ended(self, round_: Round) -> None:
        """Note that this rank has made all steps of the training, in this round."""
        if self._store.add(f"{self._prefix}/ended in {round_.number}", 1) >= len(round_.slots):
            self._settle(round_.number, _ENDED)

    def supersede(self, number: int) -> bool:
        """Say that the ranks of a round are to go on in another one; returns whether they can, as
        they have not all ended. Who comes second learns what the first has said: otherwise some
        ranks would end and others wait for them in a further round."""
        return self._settle(number, _SUPERSEDED) == _SUPERSEDED

    def have_all_ended(self, round_: Round) -> bool:
        """Return whether every rank of a round has made all steps. None leaves before."""
        key = self._get_end_key(round_.number)
        return self._store.check([key]) and self._store.get(key).decode() == _ENDED

    def _settle(self, number: int, how: str) -> str:
        return self._store.compare_set(self._get_end_key(number), "", how).decode()

    def _get_end_key(self, number: int) -> str:
        return f"{self._prefix}/end of {number}"

    def is_formed(self, round_: Round) -> bool:
        """Return whether every rank of a round has said so."""
        return self._get_member_count(round_) >= len(round_.slots)

    def is_forming(self, round_: Round) -> bool:
        """Return whether some ranks of a round have said so, and others not yet."""
        return 0 < self._get_member_count(round_) < len(round_.slots)

    def _get_member_count(self, round_: Round) -> int:
        return self._store.add(self._get_members_key(round_.number), 0)

    def _get_members_key(self, number: int) -> str:
        return f"{self._prefix}/members of {number}"

    def report_transient(self, slot: int, failure: str) -> None:
        """Say why a rank ends alone."""
        self._store.set(f"{self._prefix}/transient/{slot}", failure)

    def read_transient(self, slot: int) -> bytes | None:
        """Return what a rank that ended alone has said."""
        key = f"{self._prefix}/transient/{slot}"
        return self._store.get(key) if self._store.check([key]) else None

    def offer_replacement(self, slot: int, replacement_number: int) -> None:
        """Say that a replacement has built its experiment and waits for a round."""
        self._store.set(self._get_offer_key(slot, replacement_number), "1")

    def has_offer(self, slot: int, replacement_number: int) -> bool:
        """Return whether this replacement waits."""
        return self._store.check([self._get_offer_key(slot, replacement_number)])

    def _get_offer_key(self, slot: int, replacement_number: int) -> str:
        return f"{self._prefix}/replacement/{slot}/{replacement_number}"


def format_slots(slots: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 4`."""
    numbers = sorted(slots)
    shown = ", ".join(map(str, numbers[:16])) + (" …" if len(numbers) > 16 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
