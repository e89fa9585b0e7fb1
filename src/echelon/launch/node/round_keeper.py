"""Which ranks make up the world: decided by the agent that leads, round by round.

It knows no process and no socket: it is told what was lost and what has come back, and says which
round follows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from echelon.world.rounds import Round, format_slots


@dataclass
class RoundKeeper:
    """The membership of one attempt."""

    world_size: int
    max_losses: int
    """So many losses in a row, without a step between them, end the attempt."""
    current: Round = field(default_factory=lambda: Round(0, ()))
    """Another leader goes on from the newest round that is known."""
    _losses_in_row: int = 0
    _last_loss_step: int = -1

    def __post_init__(self) -> None:
        if not self.current.number:
            self.current = Round(0, tuple(range(self.world_size)))

    def lose(
        self, slots: Collection[int], left: Collection[int], step: int, reason: str
    ) -> Round | None:
        """Return the round without these slots, and without those that have left since they are
        done; None where the attempt cannot go on.

        `step` is the newest step that is known of any rank.
        """
        if not set(slots) & set(self.current.slots):
            return self.current  # a replacement that had not joined yet
        remaining = tuple(s for s in self.current.slots if s not in slots and s not in left)
        self._losses_in_row = 1 if step > self._last_loss_step else self._losses_in_row + 1
        self._last_loss_step = max(step, self._last_loss_step)
        if not remaining or self.has_given_up:
            return None
        return self._begin(remaining, is_planned=False, reason=f"{reason}; {_go_on(remaining)}")

    @property
    def has_given_up(self) -> bool:
        """Whether ranks were lost too often without a step between."""
        return self._losses_in_row > self.max_losses

    def plan_without(self, slots: Collection[int], reason: str) -> Round | None:
        """Return the planned round without slots whose node leaves on purpose; None where nobody
        would be left."""
        remaining = tuple(s for s in self.current.slots if s not in slots)
        if not remaining:
            return None
        return self._begin(remaining, is_planned=True, reason=f"{reason}; {_go_on(remaining)}")

    def plan_with(self, slots: Collection[int]) -> Round:
        """Return the round to which these replacements, and ranks beyond those of the start, belong
        as well."""
        members = tuple(sorted({*self.current.slots, *slots}))
        added = [s for s in slots if s >= self.world_size]
        replaced = [s for s in slots if s < self.world_size]
        what = [f"{format_slots(replaced)} replaced"] if replaced else []
        what += [f"{format_slots(added)} added"] if added else []
        reason = f"{', '.join(what)}: {len(members)} processes"
        return self._begin(members, is_planned=True, reason=reason)

    def _begin(self, slots: tuple[int, ...], is_planned: bool, reason: str) -> Round:
        self.current = Round(self.current.number + 1, slots, is_planned, reason)
        return self.current


def _go_on(slots: Collection[int]) -> str:
    return f"going on with {len(slots)} process{'es' if len(slots) > 1 else ''}"
