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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Config
from echelon.parallel.packed_tree import count_tensor_bytes, pack_tree, unpack_tree
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots, parse_step
from echelon.snapshot.memory_snapshot import MemorySnapshot
from echelon.snapshot.shards import join_shards
from echelon.snapshot.staging_buffer import StagingBuffer, to_plain_tree
from echelon.snapshot.state import broadcast_tree

if TYPE_CHECKING:
    from echelon.train.session_engine import SessionEngine

_MAX_SHARE = 0.01
"""Of the time, for copies."""
_MEET_TIMEOUT_S = 300.0


class PieceName(NamedTuple):
    """Which part of which state: that of rank `rank` of `ranks`, or all of it as 0 of 1."""

    step: int
    samples: int
    ranks: int
    rank: int


class MemoryCopies(ABC):
    """What this rank keeps of the state in its memory, and when the next copy is due."""

    held_states: int
    """So many times as large as a rank's state is what it keeps."""

    is_node_spared = True
    """Whether the others have all of the state when the ranks of one node leave."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._count, self._spent_s = 0, 0.0
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Return whether a copy that takes as long as the last one would cost at most one percent
        of the time."""
        return time.monotonic() >= self._next_s

    def keep(self, info: Mapping[str, Any], parts: Mapping[str, Any], begun_s: float) -> bool:
        """Copy the state of this rank, whose collection began at `begun_s`; return whether there is
        room for it on every rank. All ranks take part."""
        if self._group.is_any_true(not self._has_room(parts)):
            if self._group.world.rank == 0 and self._next_s != math.inf:
                print(
                    "warning: there is no room for copies of the state in memory, so the run goes "
                    "back to its newest snapshot when a rank is lost",
                    file=sys.stderr,
                )
            self._next_s = math.inf
            return False
        self._copy(json.loads(json.dumps(info)), parts)
        now_s = time.monotonic()
        self._count, self._spent_s = self._count + 1, self._spent_s + now_s - begun_s
        self._next_s = now_s + (now_s - begun_s) / _MAX_SHARE
        return True

    def _has_room(self, parts: Mapping[str, Any]) -> bool:
        """Return whether copies of all ranks of this machine leave half of its memory. Once there
        is a copy, its memory is used again."""
        needed = self.held_states * count_tensor_bytes(parts) * self._group.world.local_size
        return self._count > 0 or needed <= psutil.virtual_memory().available // 2

    def describe(self) -> dict[str, float]:
        """Return how many copies were made, and how long they took."""
        return {"count": self._count, "seconds": round(self._spent_s, 6)}

    def begin_round(self, group: RankGroup) -> None:
        """Prepare for copies among the ranks of a round. All ranks take part, in the store."""
        self._group = group
        self._next_s = -math.inf

    @abstractmethod
    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        """Copy a state."""

    @abstractmethod
    def list_pieces(self) -> list[PieceName]:
        """Return what this rank has."""

    @abstractmethod
    def get_piece(self, name: PieceName) -> MemorySnapshot:
        """Return one of them."""

    @abstractmethod
    def drop_others(self, step: int) -> None:
        """Forget the copies of other steps, to which nobody goes back."""


class WholeCopies(MemoryCopies):
    """Copies of a state that is the same on every rank: any of them is enough. The memory of the
    last one is used again."""

    held_states = 1

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._buffer = StagingBuffer()
        self._newest: MemorySnapshot | None = None

    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        self._newest = None
        with contextlib.suppress(OSError):  # no memory: then it takes the copy of another rank
            self._newest = MemorySnapshot(info, self._buffer.copy_state(parts))

    def list_pieces(self) -> list[PieceName]:
        if self._newest is None:
            return []
        return [PieceName(self._newest.step, self._newest.info["samples"], 1, 0)]

    def get_piece(self, name: PieceName) -> MemorySnapshot:
        assert self._newest is not None
        return self._newest

    def drop_others(self, step: int) -> None:
        pass


class ShardCopies(MemoryCopies):
    """Copies of a state of which every rank has a shard: its own, and that of a partner, if it can
    be on another node. The last two are kept, as a rank may be lost while a copy is made."""

    held_states = 4

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._copies = (_ShardCopy(), _ShardCopy())
        self._shift = 0

    def begin_round(self, group: RankGroup) -> None:
        super().begin_round(group)
        world = group.world
        nodes = group.exchange("on its node", str(world.node_rank), _MEET_TIMEOUT_S)
        self._shift = choose_partner_shift(nodes)
        self.is_node_spared = len(set(nodes)) == 1 or not _count_own_node(nodes, self._shift)

    def _copy(self, info: dict[str, Any], parts: Mapping[str, Any]) -> None:
        target = min(self._copies, key=lambda copy: max(copy.names, default=(-1,)))
        target.names.clear()
        tree = {"info": info, "parts": to_plain_tree(parts, ())}
        target.own = pack_tree(tree, target.own)
        world = self._group.world
        name = PieceName(info["step"], info["samples"], world.size, world.rank)
        target.names[name] = target.own
        if world.size > 1:
            partner = (world.rank - self._shift) % world.size
            target.partners = self._exchange(target.own, target.partners, partner)
            target.names[name._replace(rank=partner)] = target.partners

    def _exchange(self, own: Tensor, memory: Tensor | None, partner: int) -> Tensor:
        """Send a row to the rank that keeps it, and return that of the partner, in this memory if
        it is long enough."""
        keeper = (self._group.world.rank + self._shift) % self._group.world.size
        length = torch.tensor([len(own)])
        received = torch.empty_like(length)
        _send_and_receive(length, keeper, received, partner)
        size = int(received)
        row = memory[:size] if memory is not None and len(memory) >= size else None
        row = torch.empty(size, dtype=torch.uint8) if row is None else row
        _send_and_receive(own, keeper, row, partner)
        return row

    def list_pieces(self) -> list[PieceName]:
        return [name for copy in self._copies for name in copy.names]

    def get_piece(self, name: PieceName) -> MemorySnapshot:
        [row] = [copy.names[name] for copy in self._copies if name in copy.names]
        tree = unpack_tree(row)
        return MemorySnapshot(tree["info"], tree["parts"])

    def drop_others(self, step: int) -> None:
        for copy in self._copies:
            copy.names = {name: row for name, row in copy.names.items() if name.step == step}


@dataclass
class _ShardCopy:
    """The shards of one step on one rank, and the memory they are in."""

    names: dict[PieceName, Tensor] = field(default_factory=dict)
    own: Tensor | None = None
    partners: Tensor | None = None


def choose_partner_shift(nodes: list[str]) -> int:
    """Return how many ranks further a rank's shards are kept, given the node of every rank: so that
    as few as possible are kept on their own node."""
    return min(range(1, len(nodes)), key=lambda shift: _count_own_node(nodes, shift), default=0)


def _count_own_node(nodes: list[str], shift: int) -> int:
    """Return how many ranks' shards are kept on their own node."""
    return sum(node == nodes[(rank + shift) % len(nodes)] for rank, node in enumerate(nodes))


def _send_and_receive(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    for work in (dist.isend(sent, to), dist.irecv(received, source)):
        assert work is not None
        work.wait()


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
    _pieces: list[tuple[PieceName, int]] = field(default_factory=list)
    """Those of the copy, each with a rank that has it; empty: the ranks continue from a snapshot,
    or begin anew."""

    @property
    def has_copy(self) -> bool:
        """Whether the ranks continue from a copy in memory."""
        return bool(self._pieces)

    def agree_on_copy(self, config: Config, run: Run, group: RankGroup) -> None:
        """Find the newest copy of which the ranks have all pieces. A snapshot on disk that is newer
        is preferred: a run never goes back behind what it has saved. All ranks take part, in the
        store."""
        saved_step = -1
        if group.world.rank == 0 and config.trainer.resume in ("auto", "never"):
            folders = list_snapshots(run.snapshots_folder)
            saved_step = max((parse_step(f.name) or 0 for f in folders), default=-1)
        text = json.dumps([saved_step, self.left_step, self.copies.list_pieces()])
        found = [json.loads(t) for t in group.exchange("at the copy", text, _MEET_TIMEOUT_S)]
        holders: dict[PieceName, int] = {}
        self.left_step = max(left_step for _, left_step, _ in found)
        for rank, (*_, names) in enumerate(found):
            for name in names:
                holders.setdefault(PieceName(*name), rank)
        whole = [n for n in holders if sum(o[:3] == n[:3] for o in holders) == n.ranks]
        newest = max(whole, default=PieceName(-1, 0, 0, 0))
        self._pieces, self.position = [], newest[:2]
        if newest.step >= max(0, found[0][0]):
            self._pieces = sorted((n, r) for n, r in holders.items() if n[:3] == newest[:3])

    def begin_round(self, group: RankGroup) -> None:
        """Prepare for copies in a round, when all ranks have restored their state. Older pieces
        are of no use any more, and newer ones are of steps that are made again."""
        self.copies.drop_others(self.position[0] if self.has_copy else -1)
        self.copies.begin_round(group)

    def load_info(self, group: RankGroup) -> dict[str, Any]:
        """Return what the copy says of itself. A collective."""
        name, source = self._pieces[0]
        is_source = group.world.rank == source
        own = self.copies.get_piece(name).info if is_source else None
        info: dict[str, Any] = group.broadcast_json(own, source)
        return info

    def load_part(self, part: str, group: RankGroup) -> Any:
        """Return a part of the copy, joined from the pieces of all ranks. A collective."""
        trees = []
        for name, source in self._pieces:
            is_source = group.world.rank == source
            own = self.copies.get_piece(name).load_part(part) if is_source else None
            trees.append(broadcast_tree(own, group, source))
        return trees[0] if len(trees) == 1 else join_shards(trees)
