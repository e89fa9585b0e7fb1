"""What counts as not finite in the state of a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.snapshot.finite_check import FiniteCheck, format_tensor_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
        self.register_buffer("mask", torch.zeros(2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def build() -> echelon.Experiment:
    model = Net()
    optimizer = torch.optim.Adam(model.layer.parameters())
    model.layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    data = (torch.ones(2, 2), torch.ones(2))
    return echelon.Experiment(model, optimizer, nn.functional.mse_loss, data)


def parts(experiment: echelon.Experiment) -> dict[str, Any]:
    state = experiment.optimizer.state_dict()
    return {"model": experiment.model.state_dict(), "optimizer": {"optimizer": state}}


def set_value(experiment: echelon.Experiment, name: str, value: float) -> None:
    experiment.model.state_dict()[name].view(-1)[-1] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["layer.weight", "layer.bias", "norm.running_var"])
def test_weights_and_running_averages_must_be_finite(name: str, value: float) -> None:
    experiment = build()
    check = FiniteCheck(experiment)
    assert check.find_nonfinite(parts(experiment)) == []
    set_value(experiment, name, value)
    assert check.find_nonfinite(parts(experiment)) == [name]


def test_other_buffers_may_hold_infinities_and_no_nan() -> None:
    experiment = build()
    check = FiniteCheck(experiment)
    set_value(experiment, "mask", -torch.inf)
    assert check.find_nonfinite(parts(experiment)) == []
    set_value(experiment, "mask", torch.nan)
    assert check.find_nonfinite(parts(experiment)) == ["mask"]


def test_the_state_of_the_optimizer_counts_but_not_its_single_numbers() -> None:
    experiment = build()
    check = FiniteCheck(experiment)
    [weight, _] = experiment.model.layer.parameters()
    state = experiment.optimizer.state[weight]
    state["least_loss"] = torch.tensor(torch.inf)
    assert check.find_nonfinite(parts(experiment)) == []
    state["exp_avg_sq"][0, 0] = torch.inf
    assert check.find_nonfinite(parts(experiment)) == ["the optimizer's exp_avg_sq of layer.weight"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4,), 3e38),  # their norm overflows
        torch.full((4,), 6e4, dtype=torch.float16),
        torch.full((4,), 1e300, dtype=torch.float64),
        torch.ones(4).to(torch.float8_e4m3fn),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(0),
        torch.ones(4, dtype=torch.bool),
        torch.sparse_coo_tensor(torch.tensor([[1]]), [1.0], (3,), check_invariants=True),
        torch.ones(4, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype}".removeprefix("torch."),
)
def test_large_and_odd_tensors_are_finite(tensor: Tensor) -> None:
    assert FiniteCheck(build()).find_nonfinite({"model": {"x": tensor, "y": "text"}}) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, torch.nan], dtype=torch.float16),
        torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn),
        torch.tensor([1.0, complex(0, torch.inf)]),
        torch.sparse_coo_tensor(torch.tensor([[1]]), [torch.nan], (3,), check_invariants=True),
        {"echelon.rows": torch.tensor([torch.nan]), "from": 0, "shape": [3]},
    ],
    ids=["half", "8 bits", "complex", "sparse", "shard"],
)
def test_odd_tensors_that_are_not_finite_are_found(tensor: Any) -> None:
    found = FiniteCheck(build()).find_nonfinite({"model.00001-of-00002": {"x": tensor}})
    assert found == ["x"]


def test_many_names_are_counted() -> None:
    assert format_tensor_names(["a"]) == "a"
    assert format_tensor_names(list("abcde")) == "a, b, c and 2 more"
