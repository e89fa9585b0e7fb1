"""Which nodes make up a world, and which of them may go on without the others.

It knows no process and no socket. A side of a cut network goes on only if it has a majority of the
nodes of the newest membership, spares among them; with exactly half it is the side of the leader.
Two sides can never both have that, so they never both train.

That holds for changes too: a membership counts only once a quorum of the one before it has accepted
it. Otherwise a node that has not heard of a change could make a majority of the old membership
complete, while the leader has a majority of the new one.

A node may also leave on purpose. Then it is marked as leaving until the others go on without its
ranks, and only then removed: it is nobody's loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Member:
    """One node, and where it can be reached should it become the leader."""

    node: int
    host: str
    procs: int = 1
    lifeline: str = ""
    """HOST:PORT of its end of lifelines."""
    store: str = ""
    """HOST:PORT of its store."""
    place: int = -1
    """The number of the node whose ranks it runs: its own, or that of a lost one whose place it
    took; -1: it is a spare."""
    slots: tuple[int, ...] = ()
    """The ranks that it runs, by their numbers in round 0."""
    leaving: str = ""
    """Why it is about to leave on purpose, if it is."""
    is_added: bool = False
    """Whether it is of a further job, which ends with the run."""

    @property
    def may_lead(self) -> bool:
        """Whether it may lead. The nodes of the job that the run belongs to do."""
        return self.place >= 0 and not self.is_added

    @property
    def is_spare(self) -> bool:
        """Whether it waits to be given ranks."""
        return self.place < 0 and not self.leaving

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Member:
        """Return the member with the fields that `asdict` made of it."""
        return cls(**{**fields, "slots": tuple(fields["slots"])})


class ReturningNode(NamedTuple):
    """A node that was lost and may come back."""

    node: int
    host: str
    number: int
    """Of the agent that is started there again, if one is. No other node ever has it."""


@dataclass(frozen=True)
class Membership:
    """The nodes of a world for a while. A change has the next epoch."""

    epoch: int
    leader: int
    members: Mapping[int, Member] = field(default_factory=dict)
    can_lose_nodes: bool = False
    """Whether the ranks could go on without a node."""
    lost_hosts: tuple[str, ...] = ()
    """The hosts of all nodes that were lost since the beginning."""
    left_nodes: tuple[int, ...] = ()
    """All nodes that have left on purpose."""
    free_places: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Places that no node has, each with its slots."""
    wanted_nodes: int = 0
    """So many nodes are to run ranks, as far as there are any; 0: as many as at the beginning."""
    reserved_nodes: int = 0
    """Numbers of nodes below this one are those of nodes that were asked for."""
    faults: tuple[tuple[str, str], ...] = ()
    """A machine, by the name of its host, and what happened, for each time that it was at fault."""
    excluded_hosts: tuple[str, ...] = ()
    """Machines that were left out, and are not taken back."""
    returning: tuple[ReturningNode, ...] = ()
    """Nodes of the run's own job that are lost and have not come back."""

    @property
    def has_lost_nodes(self) -> bool:
        """Whether nodes of the beginning may be missing."""
        return bool(self.lost_hosts or self.left_nodes)

    def to_fields(self) -> dict[str, Any]:
        return asdict(self) | {"members": [asdict(m) for m in self.members.values()]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Membership:
        """Return the membership with the fields that `to_fields` made of it."""
        members = map(Member.from_fields, fields["members"])
        free_places = ((int(place), tuple(slots)) for place, slots in fields["free_places"])
        parts = {
            "members": {m.node: m for m in members},
            "lost_hosts": tuple(fields["lost_hosts"]),
            "left_nodes": tuple(fields["left_nodes"]),
            "free_places": tuple(free_places),
            "faults": tuple((str(host), str(what)) for host, what in fields["faults"]),
            "excluded_hosts": tuple(fields["excluded_hosts"]),
            "returning": tuple(ReturningNode(*each) for each in fields["returning"]),
        }
        return cls(**{**fields, **parts})

    def to_change(self, base: Membership) -> dict[str, Any]:
        """Return how it differs from one that others know. Among thousands of nodes it is short."""
        rest = replace(self, members={}).to_fields()
        changed = [m for n, m in self.members.items() if base.members.get(n) != m]
        return {
            "base": [base.epoch, base.leader],
            "changed": [asdict(m) for m in changed],
            "removed": [n for n in base.members if n not in self.members],
            "rest": rest,
        }

    def apply_change(self, change: Mapping[str, Any]) -> Membership | None:
        """Return the membership that `to_change` was made of; None if this one is not its base."""
        if change["base"] != [self.epoch, self.leader]:
            return None
        members = dict(self.members)
        for node in change["removed"]:
            members.pop(node, None)
        members |= {m.node: m for m in map(Member.from_fields, change["changed"])}
        return replace(Membership.from_fields(change["rest"]), members=members)

    def add(self, member: Member) -> Membership:
        """Return the next membership, with a node that is new or has changed."""
        free_places = tuple(v for v in self.free_places if v[0] != member.place)
        members = {**self.members, member.node: member}
        returning = tuple(r for r in self.returning if r.number != member.node)
        changed = replace(self, members=members, free_places=free_places, returning=returning)
        return replace(changed, epoch=self.epoch + 1)

    def remove(self, node: int) -> Membership:
        """Return the next membership, without a node that is lost, or has left on purpose."""
        gone = self.members.get(node)
        rest = {n: m for n, m in self.members.items() if n != node}
        changed = replace(self, epoch=self.epoch + 1, members=rest)
        if gone is None:
            return changed
        if gone.slots:
            changed = replace(changed, free_places=(*self.free_places, (gone.place, gone.slots)))
        if gone.leaving:
            return replace(changed, left_nodes=(*self.left_nodes, node))
        changed = replace(changed, lost_hosts=(*self.lost_hosts, gone.host))
        if gone.is_added:
            return changed
        _, number = self.reserve_nodes(1)
        returning = (*self.returning, ReturningNode(node, gone.host, number))
        return replace(changed, reserved_nodes=number + 1, returning=returning)

    def add_places(self, count: int) -> Membership:
        """Return the membership with so many further places, each with new slots: as many as a
        node has."""
        taken = [(m.place, m.slots) for m in self.list_nodes_with_ranks()] + [*self.free_places]
        place = max(place for place, _ in taken) + 1
        slot = max(slot for _, slots in taken for slot in slots) + 1
        size = max(len(slots) for _, slots in taken)
        added = (
            (place + i, tuple(range(slot + i * size, slot + (i + 1) * size))) for i in range(count)
        )
        return replace(self, free_places=(*self.free_places, *added))

    def reserve_nodes(self, count: int) -> tuple[Membership, int]:
        """Return the membership with so many further numbers of nodes taken, and the first one."""
        first = max(self.reserved_nodes, *(n + 1 for n in (*self.members, *self.left_nodes)))
        return replace(self, reserved_nodes=first + count), first

    def has_quorum(self, nodes: Collection[int]) -> bool:
        """Return whether these nodes may go on without the rest."""
        count = 2 * len(set(nodes) & set(self.members))
        is_half = count == len(self.members) and self.leader in nodes
        return count > len(self.members) or is_half

    def count_missing_nodes(self) -> int:
        """Return how many nodes would have to come, so that as many run ranks as are wanted."""
        there = [m for m in self.members.values() if not m.leaving]
        return max(0, self.wanted_nodes - len(there))

    def list_returning_nodes(self) -> list[ReturningNode]:
        """Return the lost nodes that are to be taken back: none beyond the number that was asked
        for, and no machine that was left out."""
        if self.wanted_nodes and not self.count_missing_nodes():
            return []
        return [each for each in self.returning if each.host not in self.excluded_hosts]

    def list_nodes_with_ranks(self) -> list[Member]:
        """Return the nodes that run ranks."""
        return [m for m in self.members.values() if m.slots]

    def find_spare(self, procs: int) -> Member | None:
        """Return the first node that runs no ranks and has room for so many."""
        spares = (m for n, m in sorted(self.members.items()) if m.is_spare and m.procs >= procs)
        return next(spares, None)
