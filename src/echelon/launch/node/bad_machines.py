"""Which machine is at fault, and whether the run does better without it.

It knows no process and no socket. Machines are told apart by their host names, since one that comes
back has another number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from echelon.errors import ExitCode
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.node_reports import RankLoss
from echelon.runs.failure import Failure


class Verdict(NamedTuple):
    """What becomes of a machine that is at fault."""

    kept_because: str = ""
    """Why it stays; empty where it is left out."""
    nodes: tuple[int, ...] = ()
    """Those that leave; a node that is lost has left already."""
    replaced_by: str = ""
    """The machines whose spares take over."""


def is_machine_at_fault(failure: Failure) -> bool:
    """Return whether a rank was lost by what a machine can be at fault for: it was killed by a
    signal (as by the kernel, when memory runs out), hung, computed wrong numbers, or was lost with
    its node. An exception is the user's."""
    exits = (ExitCode.NODE_LOST, ExitCode.WRONG_NUMBERS)
    return failure.may_be_machine or failure.exit in exits


def list_new_faults(
    membership: Membership, losses: Iterable[RankLoss], present: Collection[int]
) -> list[Failure]:
    """Return one failure for each machine on which something has gone wrong anew.

    `present` are the ranks of the round in which it happened; all others were lost before. While
    one of a machine is, another one of it is lost for the same reason, as when memory runs out; a
    replacement that is lost as well is not.
    """
    found: dict[str, Failure] = {}
    for loss in losses:
        host = loss.failure.host
        if not is_machine_at_fault(loss.failure) or host in found:
            continue
        of_host = {s for m in membership.members.values() if m.host == host for s in m.slots}
        if set(loss.slots) - set(present) or of_host <= set(present):
            found[host] = loss.failure
    return list(found.values())


def find_faulty_host(membership: Membership, max_faults: int) -> str | None:
    """Return the machine that was at fault `max_faults` times more than any other; None where there
    is none. Those that are left out already do not count.

    Where all machines are at fault alike, it is the program that is.
    """
    hosts = (host for host, _ in membership.faults if host not in membership.excluded_hosts)
    counts = Counter(hosts).most_common(2)
    if not max_faults or not counts:
        return None
    other = counts[1][1] if len(counts) > 1 else 0
    return counts[0][0] if counts[0][1] - other >= max_faults else None


def describe_faults(membership: Membership, host: str) -> str:
    """`at fault 2 times, last: killed by SIGKILL`."""
    summaries = [summary for of_host, summary in membership.faults if of_host == host]
    times = f"{len(summaries)} times" if len(summaries) > 1 else "once"
    return f"at fault {times}, last: {summaries[-1]}"


def judge_machine(
    membership: Membership, host: str, min_nodes: int, needs_spare: bool = False
) -> Verdict:
    """Return what becomes of a machine: spares take over its ranks; without them the others go on
    alone, if they are enough, unless it is left out for a spare only (`needs_spare`)."""
    present = [m for m in membership.members.values() if not m.leaving]
    here = [m for m in present if m.host == host]
    others = [m for m in present if m.slots and m.host != host]
    spares = [m for m in present if m.is_spare and m.host != host]
    # A node that was lost has left its ranks to whoever is free already.
    sizes = [len(slots) for _, slots in membership.free_places]
    taken = _match_spares(sizes + [len(m.slots) for m in here if m.slots], spares)
    left = len(others) + len(taken)
    if needs_spare and len(taken) < len(sizes) + sum(bool(m.slots) for m in here):
        return Verdict("no spare is there")
    if not others:
        return Verdict("no other machine has the state of the run")
    if left < min_nodes:
        few = f"{left} node{'s' * (left != 1)} would be left, and launch.min_nodes={min_nodes}"
        return Verdict(few)
    names = ", ".join(dict.fromkeys(spare.host for spare in taken))
    return Verdict("", tuple(m.node for m in here), names)


def _match_spares(sizes: Iterable[int], spares: Sequence[Member]) -> list[Member]:
    """Return a spare for each of these numbers of ranks, as far as there are any with room."""
    free, taken = sorted(spares, key=lambda m: m.node), []
    for size in sizes:
        if (fitting := next((s for s in free if s.procs >= size), None)) is not None:
            free.remove(fitting)
            taken.append(fitting)
    return taken
