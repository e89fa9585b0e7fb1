"""Copies of a state in the memory of ranks: whole ones, and shards with a partner's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from worlds import configured, join_gloo_group, spawn_world

from echelon.parallel.packed_tree import count_tensor_bytes, pack_tree, unpack_tree
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.train.memory_copies import KeptLoop, ShardCopies, WholeCopies, choose_partner_shift
from echelon.world.detect import detect

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


def test_a_copy_does_not_change_with_the_state(alone: RankGroup) -> None:
    copies, weights = WholeCopies(alone), torch.zeros(3)
    assert copies.keep(describe(1), {"model": {"w": weights}}, 0.0)
    weights.fill_(7.0)
    [name] = copies.list_pieces()
    assert name == (1, 8, 1, 0)
    loaded = copies.get_piece(name).load_part("model")["w"]
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
    assert not copies.list_pieces()
    assert not copies.is_due()
    assert capsys.readouterr().err.count("warning: there is no room for copies") == 1


def test_a_row_is_packed_into_the_memory_of_an_earlier_one() -> None:
    tree = {"a": [torch.arange(4), (1, None)], "b": torch.zeros(0), "c": torch.tensor(True)}
    first = pack_tree(tree | {"d": torch.ones(100)})
    second = pack_tree(tree, first)
    assert second.data_ptr() == first.data_ptr()
    found = unpack_tree(second)
    assert torch.equal(found["a"][0], torch.arange(4))
    assert found["a"][1] == (1, None)
    assert (found["b"].shape, bool(found["c"])) == ((0,), True)
    assert count_tensor_bytes(tree) == 4 * 8 + 1


def rebuild(lost: list[int], folder: str, rank: int, master: str) -> Any:
    """Copy shards of two steps; then these ranks know nothing any more."""
    group = join_gloo_group(rank, 3, master)
    copies = ShardCopies(group)
    copies.begin_round(group)
    for step in (4, 8, 9):
        rows = {"echelon.rows": step * WHOLE[2 * rank : 2 * rank + 2], "from": 2 * rank}
        shard = {"w": rows | {"shape": [6, 2]}, "count": step if rank == 0 else None}
        copies.keep(describe(step), {"model": shard}, 0.0)
    assert {name.step for name in copies.list_pieces()} == {8, 9}
    kept = KeptLoop(ShardCopies(group) if rank in lost else copies)
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
