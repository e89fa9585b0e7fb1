"""Optimizers by rows. RowAdam: every row that was looked up an Adam of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.optim import RowAdam, RowMerger, RowSGD

ROWS = 50


def table(width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(ROWS, width, generator=generator).to(dtype))


def make_row_gradient(index: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(index[None], values, shape, check_invariants=True)


def set_lookup_gradient(parameter: nn.Parameter, index: Tensor, seed: int) -> None:
    """A gradient as of an embedding: a row once for every time it occurs."""
    values = torch.randn(
        len(index), parameter.shape[1], generator=torch.Generator().manual_seed(seed)
    ).to(parameter.dtype)
    parameter.grad = make_row_gradient(index, values, parameter.shape)


def draw_indices(count: int, seed: int) -> Tensor:
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_merged_rows_are_the_sum(width: int, count: int) -> None:
    p = table(width)
    set_lookup_gradient(p, draw_indices(count, 1), 2)
    assert p.grad is not None
    index, values = RowMerger()(p.grad)
    assert len(index.unique()) == len(index) == len(values)
    found = torch.zeros(ROWS, width).index_add_(0, index, values)
    torch.testing.assert_close(found, p.grad.to_dense())


def test_merging_serves_tables_of_any_size_in_turn() -> None:
    merge = RowMerger()
    for size in (5, 900, 3, 901):
        index = torch.tensor([size - 1, 0, size - 1])
        rows = merge(make_row_gradient(index, torch.ones(3, 2), (size, 2)))
        assert sorted(zip(rows.row_indices.tolist(), rows.values[:, 0].tolist(), strict=True)) == [
            (0, 1.0),
            (size - 1, 2.0),
        ]


def test_sums_are_taken_in_the_order_of_the_batch() -> None:
    """Whatever occurrence stands for a row: else two runs might differ in the last bit."""
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    grad = make_row_gradient(torch.zeros(4, dtype=torch.int64), values, (ROWS, 1))
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert RowMerger()(grad).values.item() == expected.item()


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_row_is_an_adam_of_its_own(width: int, weight_decay: float) -> None:
    p = table(width)
    single = [nn.Parameter(row.clone()) for row in p.detach()]
    ours = RowAdam([p], lr=0.1, weight_decay=weight_decay)
    theirs = [torch.optim.AdamW([row], lr=0.1, weight_decay=weight_decay) for row in single]
    for seed in range(12):
        set_lookup_gradient(p, draw_indices(20, seed), seed)
        assert p.grad is not None
        grad = p.grad.coalesce()
        for row, value in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
            single[row].grad = value
            theirs[row].step()
        ours.step()
    torch.testing.assert_close(p.detach(), torch.stack([row.detach() for row in single]))


def test_a_row_that_is_not_looked_up_keeps_still() -> None:
    p = table(4)
    before = p.detach().clone()
    optimizer = RowAdam([p], lr=0.1, weight_decay=0.1)
    set_lookup_gradient(p, torch.tensor([3, 9, 3]), 0)
    optimizer.step()
    once = {key: value.clone() for key, value in optimizer.state[p].items()}
    set_lookup_gradient(p, torch.tensor([3]), 1)
    optimizer.step()
    changed = (p.detach() != before).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [3, 9]
    for key, value in optimizer.state[p].items():
        assert torch.equal(value[9], once[key][9])
    assert optimizer.state[p]["step"][[3, 9, 0]].tolist() == [2.0, 1.0, 0.0]


def test_many_rows_are_updated_as_few_are() -> None:
    """More than a block of them."""
    whole, parted = table(64), table(64)
    index = torch.arange(ROWS)
    one, several = RowAdam([whole]), RowAdam([parted])
    set_lookup_gradient(whole, index, 0)
    assert whole.grad is not None
    values = whole.grad.coalesce().values()
    wide = nn.Parameter(whole.detach().repeat(100, 1))
    wide.grad = make_row_gradient(torch.arange(100 * ROWS), values.repeat(100, 1), wide.shape)
    one.step()
    RowAdam([wide]).step()
    assert torch.equal(wide.detach(), whole.detach().repeat(100, 1))
    for half in index.split(ROWS // 2):
        parted.grad = make_row_gradient(half, values[half], parted.shape)
        several.step()
    assert torch.equal(parted, whole)


class Tower(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, 8, sparse=sparse)
        self.bias = nn.Embedding(ROWS, 1, sparse=sparse)
        self.tower = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, index: Tensor) -> Tensor:
        found: Tensor = self.tower(self.users(index)) + self.bias(index)
        return found


def run_steps(model: Tower, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(draw_indices(16, seed)).square().mean().backward()
        optimizer.step()


def test_dense_parameters_are_adamws() -> None:
    torch.manual_seed(0)
    ours = Tower(sparse=False)
    theirs = copy.deepcopy(ours)
    run_steps(ours, RowAdam(ours.parameters(), lr=0.05, weight_decay=0.1), range(9))
    run_steps(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.05, weight_decay=0.1), range(9))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("through_a_file", [False, True])
def test_its_state_goes_on_where_it_was(tmp_path: Any, through_a_file: bool) -> None:
    torch.manual_seed(0)
    whole = Tower()
    optimizer = RowAdam(whole.parameters(), lr=0.05)
    run_steps(whole, optimizer, range(5))
    later = copy.deepcopy(whole)
    state: Any = copy.deepcopy(optimizer.state_dict())
    if through_a_file:
        torch.save(state, tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
    resumed = RowAdam(later.parameters(), lr=0.9)
    resumed.load_state_dict(state)
    run_steps(whole, optimizer, range(5, 9))
    run_steps(later, resumed, range(5, 9))
    for p, q in zip(whole.parameters(), later.parameters(), strict=True):
        assert torch.equal(p, q)


def test_int32_indices_will_do() -> None:
    models = [Tower(), Tower()]
    models[1].load_state_dict(models[0].state_dict())
    for model, kind in zip(models, (torch.int64, torch.int32), strict=True):
        model(draw_indices(16, 0).to(kind)).sum().backward()
        RowAdam(model.parameters()).step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def test_groups_have_rates_of_their_own() -> None:
    still, moved = table(4), table(4)
    for p in (still, moved):
        set_lookup_gradient(p, torch.tensor([1]), 0)
    RowAdam([{"params": [still], "lr": 0.0}, {"params": [moved]}], lr=0.1).step()
    assert torch.equal(still, table(4))
    assert not torch.equal(moved, table(4))


def test_a_table_in_double_precision() -> None:
    p, q = table(3, dtype=torch.float64), table(3, dtype=torch.float64)
    index = torch.arange(ROWS)
    set_lookup_gradient(p, index, 0)
    assert p.grad is not None
    q.grad = p.grad.to_dense()
    RowAdam([p], lr=0.1).step()
    torch.optim.Adam([q], lr=0.1).step()
    torch.testing.assert_close(p, q)


def test_row_sgd_is_torchs_sgd() -> None:
    torch.manual_seed(0)
    ours = Tower()
    theirs = copy.deepcopy(ours)
    run_steps(ours, RowSGD(ours.parameters(), lr=0.5), range(9))
    run_steps(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), range(9))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="RowAdam"):
        RowAdam([table(2)], **wrong)
    with pytest.raises(ValueError, match="RowSGD"):
        RowSGD([table(2)], lr=-1.0)


def test_it_is_found_at_the_front_door() -> None:
    assert echelon.optim.RowAdam is RowAdam
