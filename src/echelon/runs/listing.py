"""Which runs a list leaves out by default: those that hold nothing, and those that were archived.

A run that is queued or running is always listed, also before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.runs.record import RunRecord


@dataclass(frozen=True)
class RunListing:
    """The runs of a folder, split into those that a list shows and those that it leaves out."""

    shown: list[RunRecord]
    early: list[RunRecord]
    """Over before their first step."""
    archived: list[RunRecord]

    def describe_hidden(self) -> str:
        """Return one line on what is left out, or an empty string."""
        parts = []
        if self.early:
            newest = f", the newest {self.early[0].name}" if len(self.early) > 1 else ""
            name = f" ({self.early[0].name})" if len(self.early) == 1 else newest
            parts.append(f"{len(self.early)} ended before step 1{name}")
        if self.archived:
            parts.append(f"{len(self.archived)} archived")
        return f"not shown: {'; '.join(parts)}: --all" if parts else ""


def split_listing(
    records: Sequence[RunRecord], show_all: bool, hides_early: bool = True
) -> RunListing:
    """Return what a list shows of these runs, in their order; with ``hides_early=False`` also those
    that ended before their first step."""
    if show_all:
        return RunListing(list(records), [], [])
    shown: list[RunRecord] = []
    early: list[RunRecord] = []
    archived: list[RunRecord] = []
    for record in records:
        if record.run_status.is_active:
            shown.append(record)
        elif record.is_archived:
            archived.append(record)
        elif hides_early and record.ended_before_step_1:
            early.append(record)
        else:
            shown.append(record)
    return RunListing(shown, early, archived)
