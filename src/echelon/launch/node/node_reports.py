"""What nodes report of their ranks and themselves, and what the leader makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from echelon.errors import ExitCode
from echelon.launch.node.hang_detection import RankHeartbeats
from echelon.launch.node.membership import Member
from echelon.launch.node.message_channel import Message
from echelon.runs.failure import Failure


class RankLoss(NamedTuple):
    """Ranks that are lost while the others could go on."""

    slots: list[int]
    failure: Failure


class LostNode(NamedTuple):
    """A node that is lost while the others go on."""

    member: Member
    failure: Failure


class Notice(NamedTuple):
    """A stop signal that reached one node."""

    signal: str
    since_s: float
    """time.monotonic() of the leader."""


class SlotAssignment(NamedTuple):
    """The ranks of a lost node, which a spare takes over."""

    attempt: int
    place: int
    """The number of the lost node."""
    slots: tuple[int, ...]
    world_size: int
    """Of the first round; slots may be beyond it."""
    first_replacement_number: int
    """Its replacements count from here, so that none is taken for one of the lost node."""


class HeartbeatReport(NamedTuple):
    """The heartbeats of one node together with the attempt that they belong to.

    One value, because two threads exchange it: an attempt that begins between reading the number
    and reading the heartbeats would give it those of the attempt before.
    """

    attempt: int
    heartbeats: RankHeartbeats | None
    """None: nothing is known of the ranks in this attempt."""


@dataclass
class OwnReports:
    """What this node has reported, for a leader that has not heard it."""

    done: dict[int, int] = field(default_factory=dict)
    """Attempt → the exit code of this node's ranks."""
    ending: set[int] = field(default_factory=set)
    """Attempts in which a rank of this node has ended well."""
    losses: list[tuple[int, RankLoss]] = field(default_factory=list)
    """What no round takes into account yet."""
    replacements: dict[int, dict[int, int]] = field(default_factory=dict)
    machine_fault: str = ""
    """What is wrong with this machine, if something is."""

    def to_messages(self) -> list[Message]:
        """Return the messages by which it was reported."""
        replaced = [(a, s, i) for a, of in self.replacements.items() for s, i in of.items()]
        return [
            *(make_loss_message(attempt, loss) for attempt, loss in self.losses),
            *({"replacement": [slot, number], "attempt": a} for a, slot, number in replaced),
            *({"ending": attempt} for attempt in self.ending),
            *({"done": code, "attempt": attempt} for attempt, code in self.done.items()),
            *([{"machine": self.machine_fault}] if self.machine_fault else []),
        ]


def make_loss_message(attempt: int, loss: RankLoss) -> Message:
    return {"lost": loss.slots, "cause": asdict(loss.failure), "attempt": attempt}


def make_node_lost_failure(member: Member, how: str, heartbeats: RankHeartbeats) -> Failure:
    """Return the failure of a world that lost a node."""
    step = max((s["step"] for s in heartbeats if s["begun"]), default=None)
    ranks = _format_rank_span(list(member.slots))
    noun = "ranks" if len(member.slots) > 1 else "rank"
    where = ", ".join([member.host, *([f"{noun} {ranks}"] if ranks else [])])
    summary = f"node {member.node} ({where}) {how}: it is down, cut off, or its agent was killed"
    rank = member.slots[0] if member.slots else 0
    return Failure(rank, member.host, step, summary, "", int(ExitCode.NODE_LOST))


def _format_rank_span(ranks: list[int]) -> str:
    """`3`, or `4–7`."""
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}–{max(ranks)}" if ranks else ""
