"""Copies of the state of a training in the memory of its ranks.

A loop of one's own cannot make half an iteration again, as its variables are its own; and of a
model that the ranks hold together a lost rank's shards are nowhere else. So the state is copied now
and then at a step boundary. When a rank is lost, the others build everything anew and continue from
the newest copy that is whole, as a resumed run does from a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import psutil

from echelon.config.schema import Config, ReplicaConfig
from echelon.parallel.packed_tree import count_tensor_bytes
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots, parse_step
from echelon.snapshot.manifest import count_cores
from echelon.snapshot.memory_snapshot import FlatSnapshot, MemorySnapshot
from echelon.snapshot.shards import join_shards
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.snapshot.state import broadcast_tree
from echelon.train.shard_exchange import ShardExchange, ShardName, ShardSlot

if TYPE_CHECKING:
    from echelon.train.session_engine import SessionEngine

_MAX_SHARE = 0.01
"""Of the time, for copies."""
_MEET_TIMEOUT_S = 300.0


class Obstacle(IntEnum):
    """What keeps a copy from being made. The ranks agree on the largest of theirs."""

    NONE = 0
    BUSY = 1
    """The copy before is still on its way to another rank."""
    CONNECTION = 2
    """It did not get there."""
    ROOM = 3


class MemoryCopies(ABC):
    """What this rank keeps of the state in its memory, and when the next copy is due."""

    is_node_spared = True
    """Whether the others have all of the state when the ranks of one node leave."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._count, self._blocked_s = 0, 0.0
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Return whether a copy that costs as much as the last one would take at most one percent
        of the time."""
        return time.monotonic() >= self._next_s

    def keep(self, info: Mapping[str, Any], parts: Mapping[str, Any], begun_s: float) -> bool:
        """Copy the state of this rank, whose collection began at `begun_s`; return whether that was
        possible on every rank. All ranks take part."""
        obstacle = Obstacle(self._group.find_largest(self._find_obstacle(parts)))
        if obstacle is Obstacle.NONE:
            self._copy(json.loads(json.dumps(info)), parts)
            self._count += 1
        now_s = time.monotonic()
        self._blocked_s += now_s - begun_s
        if obstacle <= Obstacle.BUSY:
            self._next_s = now_s + (now_s - begun_s) / _MAX_SHARE
        elif self._next_s != math.inf:
            self._next_s = math.inf
            self._print_warning(obstacle)
        return obstacle is Obstacle.NONE

    def _find_obstacle(self, parts: Mapping[str, Any]) -> Obstacle:
        """Return what keeps this rank from making a copy. Copies of all ranks of this machine must
        leave half of its memory; once there is a copy, its memory is used again."""
        needed = self.held_states * count_tensor_bytes(parts) * self._group.world.local_size
        has_room = self._count > 0 or needed <= psutil.virtual_memory().available // 2
        return Obstacle.NONE if has_room else Obstacle.ROOM

    def _print_warning(self, obstacle: Obstacle) -> None:
        """Say why there are no more copies in this round."""
        if obstacle is Obstacle.ROOM and self._group.world.rank == 0:
            print(
                "warning: there is no room for copies of the state in memory, so the run goes "
                "back to its newest snapshot when a rank is lost",
                file=sys.stderr,
            )

    def describe(self) -> dict[str, float]:
        """Return how many copies were made, and for how long the training waited for them."""
        return {"count": self._count, "seconds": round(self._blocked_s, 6)}

    def begin_round(self, group: RankGroup) -> None:
        """Prepare for copies among the ranks of a round. All ranks take part, in the store."""
        self._group = group
        self._next_s = -math.inf

    @property
    @abstractmethod
    def held_states(self) -> int:
        """So many times as large as a rank's state is what it keeps."""

    @abstractmethod
    def leave_round(self) -> None:
        """End what goes on in the background for a round that is over."""

    @abstractmethod
    def wait_until_kept(self, beat: Callable[[], None]) -> None:
        """Wait until nothing goes on in the background, and call `beat` meanwhile."""

    @abstractmethod
    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        """Copy a state."""

    @abstractmethod
    def list_shards(self) -> list[ShardName]:
        """Return what this rank has."""

    @abstractmethod
    def get_shard(self, name: ShardName) -> MemorySnapshot:
        """Return one of them."""

    @abstractmethod
    def drop_others(self, step: int) -> None:
        """Forget the copies of other steps, to which nobody goes back."""


class WholeCopies(MemoryCopies):
    """Copies of a state that is the same on every rank: any of them is enough. The memory of the
    last one is used again."""

    @property
    def held_states(self) -> int:
        return 1

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._buffer = StagingBuffer()
        self._newest: MemorySnapshot | None = None

    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        self._newest = None
        with contextlib.suppress(OSError):  # no memory: then it takes the copy of another rank
            self._newest = MemorySnapshot(info, self._buffer.copy_state(parts))

    def leave_round(self) -> None:
        pass

    def wait_until_kept(self, beat: Callable[[], None]) -> None:
        pass

    def list_shards(self) -> list[ShardName]:
        if self._newest is None:
            return []
        return [ShardName(self._newest.step, self._newest.info["samples"], 1, 0)]

    def get_shard(self, name: ShardName) -> MemorySnapshot:
        assert self._newest is not None
        return self._newest

    def drop_others(self, step: int) -> None:
        pass


class ShardCopies(MemoryCopies):
    """Copies of a state of which every rank has a shard: its own, and that of a partner, if it can
    be on another node. Where there are several replicas of the model, another rank has the same
    shard already, and nothing is sent. The last two copies are kept, as a rank may be lost while
    one is made.

    At the step boundary a rank copies its shard within its own memory. The exchange with others
    goes on in the background, and the next copy is not begun before it is over on every rank: so
    the older of two copies can be overwritten, as the newer one is whole.
    """

    def __init__(self, group: RankGroup, replica: ReplicaConfig) -> None:
        super().__init__(group)
        self._replica = replica
        self._slots = (ShardSlot(), ShardSlot())
        self._exchange: ShardExchange | None = None
        self._background_s = 0.0

    @property
    def held_states(self) -> int:
        """Two copies, and two of the partner's."""
        return 2 if self._exchange is None else 4

    def begin_round(self, group: RankGroup) -> None:
        super().begin_round(group)
        self.leave_round()
        self.is_node_spared = True
        size = group.world.size
        nodes = group.exchange("on its node", str(group.world.node_rank), _MEET_TIMEOUT_S)
        if size > 1 and not are_shards_repeated(nodes, self._replica.count_shards(size)):
            self._exchange = ShardExchange(group)
            self.is_node_spared = self._exchange.is_node_spared

    def leave_round(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.give_up("the round is over")
            self._background_s += exchange.processor_s

    @property
    def is_exchanging(self) -> bool:
        """Whether the last copy is still on its way to or from another rank."""
        return self._exchange is not None and self._exchange.is_busy

    def is_due(self) -> bool:
        processor_s = self._exchange.last_processor_s if self._exchange is not None else 0.0
        next_s = self._next_s + self._estimate_cost(processor_s) / _MAX_SHARE
        return not self.is_exchanging and time.monotonic() >= next_s

    def _estimate_cost(self, processor_s: float) -> float:
        """Return by how much the training is delayed, at most, where threads beside it use
        processors for so long: not at all if there are enough of them, and all of it where every
        rank has but one."""
        return processor_s * min(1.0, self._group.world.local_size / count_cores())

    def wait_until_kept(self, beat: Callable[[], None]) -> None:
        if self._exchange is not None:
            self._exchange.wait(beat)

    def describe(self) -> dict[str, float]:
        """Return besides how long processors were at work in the background."""
        now_s = self._exchange.processor_s if self._exchange is not None else 0.0
        return super().describe() | {"background_seconds": round(self._background_s + now_s, 6)}

    def _find_obstacle(self, parts: Mapping[str, Any]) -> Obstacle:
        if self._exchange is not None and self._exchange.problem:
            return Obstacle.CONNECTION
        is_busy = Obstacle.BUSY if self.is_exchanging else Obstacle.NONE
        return max(super()._find_obstacle(parts), is_busy)

    def _print_warning(self, obstacle: Obstacle) -> None:
        super()._print_warning(obstacle)
        own = self._exchange.problem if self._exchange is not None else ""
        rank = self._group.world.rank
        if obstacle is Obstacle.CONNECTION and (own or rank == 0):
            print(
                "warning: copies of the state could not be exchanged with other ranks "
                f"(rank {rank}: {own or 'see the logs of the others'}), so no more are made until "
                "ranks are replaced",
                file=sys.stderr,
            )

    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        slot = min(self._slots, key=lambda slot: slot.newest_step)
        slot.shards.clear()
        world = self._group.world
        shards = self._replica.count_shards(world.size)
        name = ShardName(info["step"], info["samples"], shards, world.rank % shards)
        try:
            slot.shards[name] = FlatSnapshot.stage(info, parts, slot.staging_buffer)
        except OSError as error:
            if self._exchange is not None:
                self._exchange.give_up(f"no memory: {error}")
            return
        if self._exchange is not None:
            self._exchange.begin(name, slot)

    def list_shards(self) -> list[ShardName]:
        return [name for slot in self._slots for name in list(slot.shards)]

    def get_shard(self, name: ShardName) -> MemorySnapshot:
        [shard] = [slot.shards[name] for slot in self._slots if name in slot.shards]
        return shard.open()

    def drop_others(self, step: int) -> None:
        for slot in self._slots:
            if slot.newest_step != step:
                slot.shards.clear()


def are_shards_repeated(nodes: Sequence[str], shards: int) -> bool:
    """Return whether several ranks hold every shard, and on several nodes if there are several,
    given the node of every rank."""
    holders = [nodes[shard::shards] for shard in range(shards)]
    least = min(2, len(set(nodes)))
    return all(len(ranks) > 1 and len(set(ranks)) >= least for ranks in holders)


@dataclass
class KeptLoop:
    """What a rank keeps of a training when it goes over to another round, and begins it anew."""

    copies: MemoryCopies
    output: SessionEngine | None = None
    """The engine of the round before, if it was rank 0's and its trackers and its writer are still
    open."""
    left_step: int = -1
    """The newest step that any rank had made when it left the round before."""
    position: tuple[int, int] = (0, 0)
    """The step and the samples of the copy that all ranks take."""
    _shards: list[tuple[ShardName, int]] = field(default_factory=list)
    """Those of the copy, each with a rank that has it; empty: the ranks continue from a snapshot,
    or begin anew."""

    @property
    def has_copy(self) -> bool:
        """Whether the ranks continue from a copy in memory."""
        return bool(self._shards)

    def agree_on_copy(self, config: Config, run: Run, group: RankGroup) -> None:
        """Find the newest copy of which the ranks have all shards. A snapshot on disk that is newer
        is preferred: a run never goes back behind what it has saved. All ranks take part, in the
        store."""
        saved_step = -1
        if group.world.rank == 0 and config.trainer.resume in ("auto", "never"):
            folders = list_snapshots(run.snapshots_folder)
            saved_step = max((parse_step(f.name) or 0 for f in folders), default=-1)
        text = json.dumps([saved_step, self.left_step, self.copies.list_shards()])
        found = [json.loads(t) for t in group.exchange("at the copy", text, _MEET_TIMEOUT_S)]
        holders: dict[ShardName, int] = {}
        self.left_step = max(left_step for _, left_step, _ in found)
        for rank, (*_, names) in enumerate(found):
            for name in names:
                holders.setdefault(ShardName(*name), rank)
        whole = [n for n in holders if sum(o[:3] == n[:3] for o in holders) == n.ranks]
        newest = max(whole, default=ShardName(-1, 0, 0, 0))
        self._shards, self.position = [], newest[:2]
        if newest.step >= max(0, found[0][0]):
            self._shards = sorted((n, r) for n, r in holders.items() if n[:3] == newest[:3])

    def begin_round(self, group: RankGroup) -> None:
        """Prepare for copies in a round, when all ranks have restored their state. Older shards
        are of no use any more, and newer ones are of steps that are made again."""
        self.copies.drop_others(self.position[0] if self.has_copy else -1)
        self.copies.begin_round(group)

    def load_info(self, group: RankGroup) -> dict[str, Any]:
        """Return what the copy says of itself. A collective."""
        name, source = self._shards[0]
        is_source = group.world.rank == source
        own = self.copies.get_shard(name).info if is_source else None
        info: dict[str, Any] = group.broadcast_json(own, source)
        return info

    def load_part(self, part: str, group: RankGroup) -> Any:
        """Return a part of the copy, joined from the shards of all ranks. A collective."""
        trees = []
        for name, source in self._shards:
            is_source = group.world.rank == source
            own = self.copies.get_shard(name).load_part(part) if is_source else None
            trees.append(broadcast_tree(own, group, source))
        return trees[0] if len(trees) == 1 else join_shards(trees)
