"""Gradients of backward passes, summed over ranks while the passes run."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import join_gloo_group, spawn_world

from echelon.parallel.gradient_reducer import GradientReducer
from echelon.parallel.row_gather import gather_rows
from echelon.parallel.user_collectives import count_collectives

pytestmark = pytest.mark.slow
HEADS = 5
ITERATIONS = 24


class Branches(nn.Module):
    """A trunk and heads, of which a pass uses some; the last head is of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(HEADS))
        self.double()
        self.heads[-1].float()

    def forward(self, x: Tensor, heads: list[int], is_repeated: bool = False) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        outputs = []
        for number in heads:
            head = self.heads[number]
            given = hidden.to(next(head.parameters()).dtype)
            if is_repeated:  # autograd computes the gradients of each call by themselves
                output = checkpoint(head, given, use_reentrant=True)
                output = output + checkpoint(head, given.square(), use_reentrant=True)
            else:
                output = head(given)
            outputs.append(output.double().square().mean())
        return torch.stack(outputs).sum() if outputs else hidden.new_zeros((), requires_grad=True)


def make_reducer(model: nn.Module, bucket_bytes: int = 40) -> GradientReducer:
    reducer = GradientReducer(1, lambda _: None, bucket_bytes, bucket_bytes)
    reducer.add_parameters(model.parameters())
    return reducer


def run_pass(reducer: GradientReducer, number: int, loss: Tensor, may_send_early: bool) -> float:
    reducer.begin(number, may_send_early)
    loss.backward()
    [control] = reducer.finish([1.0])
    return control


def compare_gradients(model: nn.Module, expected: nn.Module) -> list[str]:
    """The names of parameters whose gradients are not the same."""
    return [
        name
        for (name, ours), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        )
        if (ours.grad is None) != (theirs.grad is None)
        or (
            ours.grad is not None
            and theirs.grad is not None
            and not torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        )
    ]


def train_apart(rank: int, master: str, world_size: int, how: str) -> dict[str, Any]:
    """Passes over other heads on every rank, in every iteration, beside one process that computes
    the losses of all ranks."""
    group = join_gloo_group(rank, world_size, master)
    torch.manual_seed(0)
    model = Branches()
    alone = copy.deepcopy(model)
    reducer = make_reducer(model)
    wrong: list[str] = []
    controls = set()
    for iteration in range(ITERATIONS):
        draw = random.Random(f"{how} {iteration // 3}")  # the same thing thrice: twice as expected
        frozen = draw.randrange(HEADS) if how == "frozen" else None
        for of in (model, alone):
            for number, head in enumerate(of.heads):
                head.requires_grad_(number != frozen)
        for number in range(draw.randrange(1, 4)):
            used = [
                [h for h in range(HEADS) if h != frozen and draw.random() < 0.6]
                for _ in range(world_size)
            ]
            if how == "equal":
                used = [used[0]] * world_size
            is_repeated = how == "repeated" and draw.random() < 0.7
            rows = torch.randn(world_size, 2, 3, dtype=torch.float64)
            losses = [alone(x, heads, is_repeated) for x, heads in zip(rows, used, strict=True)]
            compute_own = partial(model, rows[rank], used[rank], is_repeated)
            if how == "gathered":
                # Autograd comes to what was computed last first: before the heads on one rank, and
                # after them on others.
                own = None if rank else compute_own()
                hidden = torch.tanh(model.trunk(rows[rank]))
                gathered = gather_rows(hidden, world_size).prod(0).sum() / world_size
                own = gathered + (compute_own() if own is None else own)
                losses.append(torch.tanh(alone.trunk(rows.flatten(0, 1))).prod(0).sum())
            else:
                own = compute_own()
            controls.add(run_pass(reducer, number, own, may_send_early=True))
            torch.stack(losses).sum().backward()
            wrong += [f"{iteration}/{number}: {n}" for n in compare_gradients(model, alone)]
        if draw.random() < 0.7:
            model.zero_grad()
            alone.zero_grad()
    group.barrier_before_exit()
    return {"wrong": wrong, "controls": list(controls)}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["equal", "unequal", "frozen", "repeated", "gathered"])
def test_the_gradients_are_those_of_one_process(how: str, world_size: int, tmp_path: Path) -> None:
    ranks = spawn_world(
        world_size, partial(train_apart, world_size=world_size, how=how), tmp_path, limit_s=60
    )
    for rank in ranks:
        assert rank.code == 0, rank.output
        assert rank.value == {"wrong": [], "controls": [float(world_size)]}


def watch_messages(rank: int, master: str) -> list[list[int]]:
    """How many messages had left before each layer's backward pass, in passes one after the
    other."""
    group = join_gloo_group(rank, 2, master)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    reducer = make_reducer(layers)
    seen: list[list[int]] = []
    for may_send_early in (True, True, False, True):
        counts = [count_collectives()]
        hidden = torch.ones(1, 4)
        for layer in layers:
            hidden = layer(hidden)
            hidden.register_hook(partial(_note_messages, counts))
        run_pass(reducer, 0, hidden.sum(), may_send_early)
        _note_messages(counts, hidden)
        seen.append([count - counts[0] for count in counts[1:]])
    group.barrier_before_exit()
    return seen


def _note_messages(counts: list[int], _: Tensor) -> None:
    counts.append(count_collectives())


def test_buckets_leave_while_the_backward_pass_runs(tmp_path: Path) -> None:
    """A bucket is a weight of 64 bytes, or a bias and a weight: 16 are not enough to close one."""
    ranks = spawn_world(2, watch_messages, tmp_path)
    for rank in ranks:
        assert rank.code == 0, rank.output
        first, second, deferred, last = rank.value
        assert first[:4] == [0, 0, 0, 0]  # nothing is known yet
        assert first[4] == 1 + 4
        assert second == last == [0, 1, 2, 3, 4]  # last layer first
        assert deferred == [0, 0, 0, 0, 4]


def compare_histories(rank: int, master: str) -> bool:
    """Whether gradients are the same to the bit where every pass is a reducer's first."""
    group = join_gloo_group(rank, 3, master)
    torch.manual_seed(0)
    expecting, model = Branches(), Branches()
    model.load_state_dict(expecting.state_dict())
    reducer = make_reducer(expecting, 200)
    is_same = True
    for iteration in range(6):
        x = torch.randn(3, 50, 3, dtype=torch.float64)[rank]
        for of, by in ((expecting, reducer), (model, make_reducer(model, 200))):
            of.zero_grad()
            heads = list(range(HEADS - (iteration % 2)))
            run_pass(by, 0, of(x, heads), may_send_early=True)
        for ours, theirs in zip(expecting.parameters(), model.parameters(), strict=True):
            is_same &= (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                is_same &= torch.equal(ours.grad, theirs.grad)
    group.barrier_before_exit()
    return is_same


def test_what_was_expected_changes_no_bit(tmp_path: Path) -> None:
    ranks = spawn_world(3, compare_histories, tmp_path)
    assert [(rank.code, rank.value) for rank in ranks] == [(0, True)] * 3, ranks


def change_in_hooks(rank: int, master: str) -> bool:
    """Hooks of the user change gradients of this rank's share before they are summed."""
    group = join_gloo_group(rank, 2, master)
    torch.manual_seed(0)
    model = Branches()
    alone = copy.deepcopy(model)
    reducer = make_reducer(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_double_gradient)
    is_same = True
    for _ in range(3):
        x = torch.randn(2, 2, 3, dtype=torch.float64)
        for of in (model, alone):
            of.zero_grad()
        run_pass(reducer, 0, model(x[rank], list(range(HEADS))), may_send_early=True)
        (2 * sum(alone(row, list(range(HEADS))) for row in x)).backward()
        is_same &= compare_gradients(model, alone) == []
    group.barrier_before_exit()
    return is_same


def _double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def test_hooks_of_the_user_come_before_the_sum(tmp_path: Path) -> None:
    ranks = spawn_world(2, change_in_hooks, tmp_path)
    assert [(rank.code, rank.value) for rank in ranks] == [(0, True)] * 2, ranks


def fail_once(rank: int, master: str) -> bool:
    """A pass that fails on all ranks after the first bucket has left."""
    group = join_gloo_group(rank, 2, master)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    reducer = make_reducer(layers)
    x = torch.ones(1, 4)
    for _ in range(2):
        layers.zero_grad()
        run_pass(reducer, 0, layers(x).sum(), may_send_early=True)
    expected = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    before = count_collectives()
    reducer.begin(0, may_send_early=True)
    hidden = layers[0](x)
    hidden.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        layers[1:](hidden).sum().backward()
    reducer.abort()
    assert count_collectives() > before
    kept = [p.grad for p in layers.parameters() if p.grad is not None]
    is_kept = all(map(torch.equal, kept, expected))
    layers.zero_grad()
    run_pass(reducer, 0, layers(x).sum(), may_send_early=True)
    found = [p.grad for p in layers.parameters() if p.grad is not None]
    group.barrier_before_exit()
    return is_kept and all(map(torch.equal, found, expected))


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def test_after_a_pass_that_failed_the_next_one_is_right(tmp_path: Path) -> None:
    ranks = spawn_world(2, fail_once, tmp_path)
    assert [(rank.code, rank.value) for rank in ranks] == [(0, True)] * 2, ranks
