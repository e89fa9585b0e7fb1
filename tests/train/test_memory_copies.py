"""Copies of a state in the memory of ranks: whole ones, and shards with a partner's."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from worlds import configured, differing, join_gloo_group, spawn_world, wait_until

from echelon.config.schema import ReplicaConfig
from echelon.parallel.packed_tree import count_tensor_bytes, pack_tree, unpack_tree
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.snapshot.memory_snapshot import FlatSnapshot
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.train.memory_copies import KeptLoop, ShardCopies, WholeCopies, are_shards_repeated
from echelon.train.shard_exchange import choose_partner_shift
from echelon.utils.sockets import list_sockets
from echelon.world.detect import detect

SHARDED = ReplicaConfig(kind="fsdp")
WHOLE = torch.arange(12.0).reshape(6, 2)


@pytest.fixture
def alone() -> RankGroup:
    return RankGroup(detect({}, visible_devices=0).world, None, False, 60.0)


def describe(step: int) -> dict[str, Any]:
    return {"step": step, "samples": 8 * step}


@pytest.mark.parametrize(
    ("nodes", "shift"),
    [("0", 0), ("00", 1), ("000", 1), ("01", 1), ("0011", 2), ("000111", 3), ("0001", 1)],
)
def test_shards_are_kept_on_another_node_if_there_is_one(nodes: str, shift: int) -> None:
    assert choose_partner_shift(list(nodes)) == shift


@pytest.mark.parametrize(
    ("nodes", "shards", "is_repeated"),
    [
        ("000", 3, False),
        ("0000", 2, True),
        ("0011", 4, False),
        ("0011", 2, True),
        ("000111", 2, True),
        ("000011", 2, True),
        ("000001", 2, False),
        ("00000011", 4, False),
    ],
)
def test_replicas_on_several_nodes_need_no_copies_of_each_other(
    nodes: str, shards: int, is_repeated: bool
) -> None:
    assert are_shards_repeated(list(nodes), shards) == is_repeated


def test_a_copy_does_not_change_with_the_state(alone: RankGroup) -> None:
    copies, weights = WholeCopies(alone), torch.zeros(3)
    assert copies.keep(describe(1), {"model": {"w": weights}}, 0.0)
    weights.fill_(7.0)
    [name] = copies.list_shards()
    assert name == (1, 8, 1, 0)
    loaded = copies.get_shard(name).load_part("model")["w"]
    assert torch.equal(loaded, torch.zeros(3))
    assert copies.keep(describe(2), {"model": {"w": weights}}, 0.0)  # in the same memory
    assert torch.equal(loaded, torch.zeros(3))


def test_a_copy_that_has_no_room_is_not_made(
    alone: RankGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    copies = WholeCopies(alone)
    for _ in range(2):
        assert not copies.keep(describe(1), {"model": torch.zeros(1 << 10)}, 0.0)
    assert not copies.list_shards()
    assert not copies.is_due()
    assert capsys.readouterr().err.count("warning: there is no room for copies") == 1


def test_a_row_has_all_of_a_tree() -> None:
    tree = {"a": [torch.arange(4), (1, None)], "b": torch.zeros(0), "c": torch.tensor(True)}
    found = unpack_tree(pack_tree(tree))
    assert torch.equal(found["a"][0], torch.arange(4))
    assert found["a"][1] == (1, None)
    assert (found["b"].shape, bool(found["c"])) == ((0,), True)
    assert count_tensor_bytes(tree) == 4 * 8 + 1


def test_a_flat_snapshot_has_all_of_a_state() -> None:
    """Shared storages, slices and strides among it."""
    whole, lone = torch.arange(12.0).reshape(3, 4), torch.arange(100, dtype=torch.int16)
    parts = {
        "model": {"w": whole, "same": whole, "turned": whole.T, "slice": lone[7:9], 3: (1, None)},
        "state": [torch.tensor(True), torch.zeros(0, 5), "text"],
    }
    buffer = StagingBuffer()
    flat = FlatSnapshot.stage(describe(4), parts, buffer)
    layout = json.loads(json.dumps(flat.layout))  # as it travels
    sent = FlatSnapshot(flat.info, layout, memoryview(bytearray(flat.memory)))
    for found in (flat.open(), sent.open()):
        assert found.step == 4
        assert differing({name: found.load_part(name) for name in parts}, parts) == []
    again = FlatSnapshot.stage(describe(5), {"model": whole + 1}, buffer)  # in the same memory
    assert torch.equal(again.open().load_part("model"), whole + 1)
    assert again.memory.obj is flat.memory.obj


def rebuild(lost: list[int], folder: str, rank: int, master: str) -> Any:
    """Copy shards of two steps; then these ranks know nothing any more."""
    group = join_gloo_group(rank, 3, master)
    copies = ShardCopies(group, SHARDED)
    copies.begin_round(group)
    for step in (4, 8, 9):
        rows = {"echelon.rows": step * WHOLE[2 * rank : 2 * rank + 2], "from": 2 * rank}
        shard = {"w": rows | {"shape": [6, 2]}, "count": step if rank == 0 else None}
        assert copies.keep(describe(step), {"model": shard}, time.monotonic())
        copies.wait_until_kept(lambda: None)
    assert {name.step for name in copies.list_shards()} == {8, 9}
    copies.leave_round()
    kept = KeptLoop(ShardCopies(group, SHARDED) if rank in lost else copies)
    kept.agree_on_copy(configured(Path(folder), ()), Run(Path(folder)), group)
    group.barrier_before_exit()  # rank 0 hosts the store
    if not kept.has_copy:
        return None
    assert kept.load_info(group) == describe(9)
    part = kept.load_part("model", group)
    return [kept.position, part["count"], torch.equal(part["w"], 9 * WHOLE)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[], [0], [1], [2], [0, 1]], ids=str)
def test_the_shards_of_a_lost_rank_are_with_its_partner(lost: list[int], tmp_path: Path) -> None:
    """Of two that are lost, one has kept the shards of the other."""
    ended = spawn_world(3, partial(rebuild, lost, str(tmp_path)), tmp_path)
    wanted = None if len(lost) > 1 else [[9, 72], 9, True]
    assert [(rank.code, rank.value) for rank in ended] == [(0, wanted)] * 3, ended


def make_rows(rank: int, size: int, step: int) -> dict[str, Any]:
    """Return a rank's shard of so many rows that sending them takes a moment."""
    rows = torch.full((1 << 22, 6 // size), float(step))
    return {"w": {"echelon.rows": rows.T, "from": 6 // size * rank, "shape": [6, 1 << 22]}}


def list_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "copies"]


def lose_a_rank(folder: str, rank: int, master: str) -> Any:
    """Rank 1 is killed while it sends its shard; the others go on in a round of their own."""
    group = join_gloo_group(rank, 3, master)
    torch.distributed.barrier()  # rank 0's store has accepted all connections
    sockets = len(list_sockets())
    copies = ShardCopies(group, SHARDED)
    copies.begin_round(group)
    for step in (4, 8):
        assert copies.keep(describe(step), {"model": make_rows(rank, 3, step)}, time.monotonic())
        if step == 8 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        copies.wait_until_kept(lambda: None)
    with suppress(RuntimeError):
        group.barrier_before_exit()  # as a training would notice it
    group.interrupt_process_group()
    copies.leave_round()
    wait_until(lambda: not list_threads(), "the threads have ended")
    wait_until(lambda: len(list_sockets()) <= sockets, "their connections are closed")
    group.close_process_group()
    world = replace(group.world, rank=int(rank > 0), size=2)
    assert group.store is not None
    group = RankGroup(world, group.store.open_prefix("next"), group.hosts_store, 60.0)
    group.init_process_group("gloo")
    kept = KeptLoop(copies)
    kept.agree_on_copy(configured(Path(folder), ()), Run(Path(folder)), group)
    assert kept.has_copy
    step = kept.position[0]
    part = kept.load_part("model", group)
    kept.begin_round(group)
    assert copies.keep(describe(9), {"model": make_rows(world.rank, 2, 9)}, time.monotonic())
    copies.wait_until_kept(lambda: None)
    newest = sorted(name for name in copies.list_shards() if name.step == 9)
    copies.leave_round()
    group.barrier_before_exit()
    assert newest == [(9, 72, 2, 0), (9, 72, 2, 1)]
    return [step in (4, 8), list(part["w"].shape), bool((part["w"] == step).all())]


@pytest.mark.slow
def test_a_rank_that_is_lost_while_it_sends_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = spawn_world(3, partial(lose_a_rank, str(tmp_path)), tmp_path)
    assert ended[1].code == -signal.SIGKILL
    wanted = (0, [True, [6, 1 << 22], True])
    assert [(rank.code, rank.value) for rank in ended[::2]] == [wanted] * 2, ended
