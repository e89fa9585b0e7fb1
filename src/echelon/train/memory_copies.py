"""Copies of the state of a user's loop in the memory of every rank.

A loop of one's own cannot make half an iteration again, as its variables are its own. So the state
is copied now and then at a step boundary. When a rank is lost, the others call the user's function
again, and everybody continues from the newest copy, as a resumed run does from a snapshot.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.config.schema import Config
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots, parse_step
from echelon.snapshot.memory_snapshot import MemorySnapshot
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.utils.os_errors import format_os_error_reason

if TYPE_CHECKING:
    from echelon.train.session_engine import SessionEngine

_MAX_SHARE = 0.01
"""Of the time, for copies."""
_MEET_TIMEOUT_S = 300.0


class MemoryCopies:
    """The newest copy of the state on this rank, and when the next one is due."""

    def __init__(self) -> None:
        self._buffer = StagingBuffer()
        self.newest: MemorySnapshot | None = None
        self._count, self._spent_s = 0, 0.0
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Return whether a copy that takes as long as the last one would cost at most one percent
        of the time."""
        return time.monotonic() >= self._next_s

    def describe(self) -> dict[str, float]:
        """Return how many copies were made, and how long they took."""
        return {"count": self._count, "seconds": round(self._spent_s, 6)}

    def keep(self, info: Mapping[str, Any], parts: Mapping[str, Any], begun_s: float) -> None:
        """Copy a state into the memory of the copy before. `begun_s` is when its collection
        began."""
        self.newest = None
        try:
            copied = self._buffer.copy_state(parts)
        except OSError as error:
            reason = format_os_error_reason(error)
            print(f"warning: the state is not copied in memory: {reason}", file=sys.stderr)
            self._next_s = math.inf
            return
        self.newest = MemorySnapshot(json.loads(json.dumps(info)), copied)
        now_s = time.monotonic()
        self._count, self._spent_s = self._count + 1, self._spent_s + now_s - begun_s
        self._next_s = now_s + (now_s - begun_s) / _MAX_SHARE


@dataclass
class KeptLoop:
    """What a rank keeps of a user's loop when it goes over to another round."""

    copies: MemoryCopies = field(default_factory=MemoryCopies)
    output: SessionEngine | None = None
    """The engine of the round before, if it was rank 0's: its trackers and its writer may be
    open."""
    source: int | None = None
    """The rank whose copy all ranks take; None: they continue from a snapshot, or begin anew."""
    position: tuple[int, int] = (0, 0)
    """The step and the samples of that copy."""

    def agree_on_copy(self, config: Config, run: Run, group: RankGroup) -> None:
        """Find the newest copy that any rank has. A snapshot on disk that is newer is preferred: a
        run never goes back behind what it has saved. All ranks take part, in the store."""
        own = self.copies.newest
        place = [-1, 0] if own is None else [own.step, own.info["samples"]]
        saved_step = -1
        if group.world.rank == 0 and config.trainer.resume in ("auto", "never"):
            folders = list_snapshots(run.snapshots_folder)
            saved_step = max((parse_step(f.name) or 0 for f in folders), default=-1)
        text = json.dumps([place, saved_step])
        found = [json.loads(t) for t in group.exchange("at the copy", text, _MEET_TIMEOUT_S)]
        places = [of_rank[0] for of_rank in found]
        newest = max(places)
        self.source = None
        if newest[0] >= max(0, found[0][1]):
            self.source, self.position = places.index(newest), (newest[0], newest[1])
