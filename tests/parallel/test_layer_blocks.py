"""Which layers are sharded and recomputed one by one, and how a state is cut and joined."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from echelon.config.compose import compose
from echelon.errors import EchelonError
from echelon.experiment.compilation import CompiledFunction
from echelon.launch.inline_launcher import InlineLauncher
from echelon.launch.local_launcher import LocalLauncher
from echelon.launch.plan import LocalMachine
from echelon.parallel.fsdp_wrap import reduce_unused_parameters
from echelon.parallel.layer_blocks import (
    checkpoint_blocks,
    find_blocks,
    require_checkpoint_blocks,
    require_shardable,
)
from echelon.runs.heartbeat import Heartbeat
from echelon.snapshot.shards import format_shard_name, get_row_range, group_shard_names, join_shards


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_layers_of_the_longest_list_are_the_blocks() -> None:
    model = Model(3)
    assert find_blocks(model, []) == list(model.layers)
    two = Model(2)  # as long as the lists inside: the outer one
    assert find_blocks(two, []) == list(two.layers)


def test_layers_without_parameters_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    assert find_blocks(model, []) == [model[0], model[2]]


def test_lists_of_lists_have_no_pass_of_their_own() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]) for _ in range(3)])
    assert [type(block) for block in find_blocks(model, [])] == [nn.Linear]


def test_a_model_without_a_list_has_no_blocks() -> None:
    assert find_blocks(nn.Linear(2, 2), []) == []
    with pytest.raises(EchelonError, match=r"replica\.blocks=\[Block\]"):
        require_checkpoint_blocks([])


def test_blocks_by_the_names_of_their_classes() -> None:
    model = Model(2)
    assert find_blocks(model, ["Layer"]) == list(model.layers)
    assert len(find_blocks(model, ["Layer", "Linear"])) == 2 + 1 + 4
    with pytest.raises(EchelonError) as told:
        find_blocks(model, ["Lair", "Model"])
    assert [fault.what.split("'")[1] for fault in told.value.faults] == ["Lair", "Model"]
    assert "did you mean 'Layer'?" in told.value.faults[0].do


def test_recomputed_layers_give_the_same_gradients_and_names() -> None:
    model, plain = Model(3), Model(3)
    plain.load_state_dict(model.state_dict())
    checkpoint_blocks(find_blocks(model, []))
    x = torch.randn(4, 2)
    for one in (model, plain):
        one(x).square().sum().backward()
    named = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, named[name].grad, rtol=0, atol=0)


def make_norm_layers() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers)


def call_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(x) + model(x + 1)).square().sum()
    return found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputed_layers_count_a_batch_once(compiled: bool) -> None:
    again, plain = make_norm_layers(), make_norm_layers()
    checkpoint_blocks(find_blocks(again, []))
    again[0][1].eval()  # type: ignore[index]  # its averages are used, and stay
    plain[0][1].eval()  # type: ignore[index]
    for one in (again, plain):
        twice = partial(call_twice, one)
        loss = CompiledFunction(twice, Heartbeat(), "aot_eager") if compiled else twice
        for batch in (1.0, 2.0):
            loss(torch.linspace(-batch, 3, 8).view(4, 2)).backward()
    assert int(plain[1][1].num_batches_tracked) == 4  # type: ignore[index]
    for name, wanted in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], wanted), name
    for p, q in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_a_model_that_is_a_mere_list_cannot_be_sharded() -> None:
    """Weights are gathered around a model's own pass, and it has none."""
    with pytest.raises(EchelonError, match="it is a ModuleList, which has no forward"):
        require_shardable(nn.ModuleList([nn.Linear(2, 1)]))
    require_shardable(Model(2))


def test_parameters_that_some_ranks_do_not_use_need_a_new_torch() -> None:
    """Gradients of different lengths would meet in one collective: a crash, or a hang."""
    of_older_torch = cast(FSDPModule, nn.Linear(2, 1))
    with pytest.raises(EchelonError, match=r"needs torch 2\.13 with a sharded model"):
        reduce_unused_parameters(of_older_torch)


@pytest.mark.parametrize(("rows", "size"), [(7, 3), (1, 4), (8, 4), (5, 4), (0, 2)])
def test_rows_are_cut_as_torch_does(rows: int, size: int) -> None:
    whole = torch.arange(rows)
    cut = [whole[slice(*get_row_range(rows, rank, size))] for rank in range(size)]
    wanted = [piece for piece in whole.chunk(size) if len(piece)]
    assert [piece.tolist() for piece in cut if len(piece)] == [p.tolist() for p in wanted]


def test_pieces_join_to_what_was_cut() -> None:
    whole = torch.randn(5, 2)
    ranges = [get_row_range(5, rank, 4) for rank in range(4)]
    trees = [
        {
            "state": {0: {"m": {"echelon.rows": whole[a:b], "from": a, "shape": [5, 2]}}},
            "lr": 0.1 if a == 0 else None,
            "pair": ("x" if a == 0 else None, [1 if a == 0 else None]),
        }
        for a, b in ranges
    ]
    joined = join_shards(trees)
    assert torch.equal(joined["state"][0]["m"], whole)
    assert (joined["lr"], joined["pair"]) == (0.1, ("x", [1]))


def test_a_part_needs_all_its_pieces() -> None:
    names = [format_shard_name("model", rank, 3) for rank in range(3)]
    assert group_shard_names([*names, "rng"]) == {"model": names, "rng": ["rng"]}
    with pytest.raises(ValueError, match="model: 2 of 3 pieces"):
        group_shard_names([names[0], names[2]])
    with pytest.raises(ValueError, match="model"):
        group_shard_names(["model", *names])


def test_the_plan_says_that_the_model_is_shared_out() -> None:
    words = ["launch=local", "launch.procs=2"]
    here = LocalMachine({}, "here", 0)
    assert "(fsdp)" in LocalLauncher().plan(compose([*words, "replica.kind=fsdp"]), here).steps[1]
    assert "fsdp" not in LocalLauncher().plan(compose(words), here).steps[1]


def test_the_plan_of_one_process_that_has_nobody_to_share_with() -> None:
    with pytest.raises(EchelonError, match="there is only one process"):
        InlineLauncher().plan(compose(["replica.kind=fsdp"]), LocalMachine({}, "here", 0))
    of_two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    of_two |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert (
        InlineLauncher()
        .plan(compose(["replica.kind=fsdp"]), LocalMachine(of_two, "here", 0))
        .places[0]
        .rank
        == 0
    )


@pytest.mark.parametrize("other", ["replica.devices=2", "trainer.capture=always"])
def test_what_does_not_go_with_shards(other: str) -> None:
    with pytest.raises(EchelonError, match=f"{other}, but replica.kind=fsdp"):
        compose(["launch=local", "launch.procs=2", "replica.kind=fsdp", other])
