"""How many nodes a run has is changed while it trains: what the leader answers `echelon scale`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from echelon.config.validate import check_min_batch_size
from echelon.errors import Fault
from echelon.launch.node.lifeline import Lifeline


@dataclass(frozen=True)
class ScaleLimits:
    """Between which numbers of nodes a run may be scaled."""

    min_nodes: int
    max_nodes: int | None
    """None: as many as the queue gives; 0: those that are there, since nobody starts others."""
    batch_size: int


@dataclass(frozen=True)
class ScaleAnswer:
    """What the leader has begun, or why it has not."""

    faults: tuple[Fault, ...] = ()
    before: int = 0
    """Nodes that run ranks, without those that are about to leave."""
    leaving: tuple[str, ...] = ()
    """The hosts of the nodes that leave. Another node may stay on one of them."""
    leaving_nodes: tuple[int, ...] = ()
    """The numbers of these nodes."""
    vacated_hosts: tuple[str, ...] = ()
    """Hosts of the run's own job on which no node of that job is left."""
    joining: tuple[str, ...] = ()
    """Hosts of spares that are given ranks."""
    missing: int = 0
    """So many nodes have to be started, by the launcher or as a further job."""
    first_node: int = 0
    """The numbers of the missing ones begin here."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ScaleAnswer:
        """Return the answer with the fields that `to_json` made of it."""
        parts = {key: tuple(fields[key]) for key in _TUPLES}
        return cls(**{**fields, **parts, "faults": tuple(Fault(*f) for f in fields["faults"])})


_TUPLES = ("leaving", "leaving_nodes", "vacated_hosts", "joining")


def scale_nodes(lifeline: Lifeline, count: int, limits: ScaleLimits) -> ScaleAnswer:
    """On the leader: have so many nodes run ranks. The last ones leave, or spares and nodes that
    come later are given ranks."""
    known = lifeline.membership
    holders = sorted(known.list_nodes_with_ranks(), key=lambda m: m.node)
    staying = [m for m in holders if not m.leaving]
    spares = [m for m in known.members.values() if m.is_spare]
    if faults := _find_faults(lifeline, count, limits):
        return ScaleAnswer(tuple(faults), len(staying))
    added = max(0, count - len(holders) - len(known.free_places))
    lifeline.set_wanted_nodes(count, added)
    leaving = staying[count:]
    for member in leaving:
        lifeline.ask_to_leave(member.node, f"scaled to {count} node{'s' * (count > 1)}")
    joining = spares[: max(0, count - len(staying))]
    missing = max(0, count - len(staying) - len(joining))
    own_hosts = {m.host for m in leaving if not m.is_added}
    kept_hosts = {
        m.host
        for m in known.members.values()
        if m not in leaving and not m.leaving and not m.is_added
    }
    return ScaleAnswer(
        before=len(staying),
        leaving=tuple(m.host for m in leaving),
        leaving_nodes=tuple(m.node for m in leaving),
        vacated_hosts=tuple(sorted(own_hosts - kept_hosts)),
        joining=tuple(m.host for m in joining),
        missing=missing,
        first_node=lifeline.reserve_nodes(missing) if missing else 0,
    )


def _find_faults(lifeline: Lifeline, count: int, limits: ScaleLimits) -> list[Fault]:
    known, faults = lifeline.membership, []
    if not known.can_lose_nodes:
        why = "it has not begun to train, or ends, or its state cannot be handed on (NCCL)"
        faults.append(
            Fault(
                f"the ranks of this run cannot go on without one of them now: {why}",
                "`echelon show RUN` and the plan of `echelon train --dry-run` say more",
            )
        )
    if count < limits.min_nodes:
        faults.append(
            Fault(
                f"nodes={count}, but launch.min_nodes={limits.min_nodes}",
                f"give {limits.min_nodes} or more; `echelon cancel RUN` saves and ends it",
            )
        )
    there = [m for m in known.members.values() if not m.leaving]
    if limits.max_nodes is not None and count > max(limits.max_nodes, len(there)):
        most = max(limits.max_nodes, len(there))
        faults.append(
            Fault(
                f"nodes={count}, but there are {most} nodes for this run",
                "name more hosts at the start (launch.hosts, launch.spares), or start nodes by a "
                "launcher that can: launch=ssh or launch=slurm",
            )
        )
    if there:
        procs = max(len(m.slots) for m in there)
        if fault := check_min_batch_size(limits.batch_size, count * procs):
            faults.append(fault)
    return faults
