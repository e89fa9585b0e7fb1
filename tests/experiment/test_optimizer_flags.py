"""How optimizers are carried out, and that snapshots do not say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import (
    OptimizerFlags,
    enable_fused_kernels,
    make_capturable,
    match_state_layout,
)

CPU = torch.device("cpu")


def experiment(make: str, **settings: object) -> Experiment:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.1, **settings)
    return Experiment(model, optimizer, nn.functional.mse_loss, None)


def run_steps(e: Experiment, steps: int = 3) -> list[torch.Tensor]:
    x = torch.arange(12.0).view(3, 4) / 12
    for _ in range(steps):
        e.model(x).square().mean().backward()
        e.optimizer.step()
        e.optimizer.zero_grad()
    return [p.detach().clone() for p in e.model.parameters()]


@pytest.mark.parametrize("make", ["Adam", "AdamW"])
def test_adam_is_fused_and_steps_as_before(make: str) -> None:
    plain, fused = experiment(make), experiment(make)
    enable_fused_kernels(fused.optimizer, fused.model, CPU)
    assert all(group["fused"] for group in fused.optimizer.param_groups)
    for a, b in zip(run_steps(plain), run_steps(fused), strict=True):
        torch.testing.assert_close(a, b)


GPU = torch.device("cuda")
"""Where SGD is fused; torch can do it on a CPU as well."""


def test_fused_momentum_survives_a_first_step_that_is_skipped() -> None:
    plain, fused = experiment("SGD", momentum=0.9), experiment("SGD", momentum=0.9)
    enable_fused_kernels(fused.optimizer, fused.model, GPU)
    assert fused.optimizer.param_groups[0]["fused"]
    fused.optimizer.found_inf = torch.tensor(1.0)  # as a scaler says it
    run_steps(fused, 1)
    fused.optimizer.found_inf = torch.tensor(0.0)
    for a, b in zip(run_steps(plain), run_steps(fused), strict=True):
        torch.testing.assert_close(a, b)


def test_fused_momentum_of_a_layer_that_joins_later() -> None:
    plain, fused = experiment("SGD", momentum=0.9), experiment("SGD", momentum=0.9)
    enable_fused_kernels(fused.optimizer, fused.model, GPU)
    for e in (plain, fused):
        first, _, last = e.model
        nn.init.ones_(last.weight)
        last(first(torch.ones(1, 4)).detach()).sum().backward()
        e.optimizer.step()
        e.optimizer.zero_grad()
    for a, b in zip(run_steps(plain), run_steps(fused), strict=True):
        torch.testing.assert_close(a, b)


def test_dampened_momentum_is_not_fused() -> None:
    e = experiment("SGD", momentum=0.9, dampening=0.1)
    enable_fused_kernels(e.optimizer, e.model, GPU)
    assert e.optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    ("make", "settings"),
    [("Adam", {"foreach": True}), ("Adam", {"fused": False}), ("Adagrad", {}), ("SGD", {})],
)
def test_what_the_experiment_chose_or_torch_lacks_stays(
    make: str, settings: dict[str, object]
) -> None:
    e = experiment(make, **settings)
    before = copy.deepcopy([{**g, "params": []} for g in e.optimizer.param_groups])
    enable_fused_kernels(e.optimizer, e.model, CPU)
    assert [{**g, "params": []} for g in e.optimizer.param_groups] == before


def test_a_snapshot_says_what_the_experiment_chose() -> None:
    e = experiment("Adam")
    ways = OptimizerFlags(e.optimizer)
    enable_fused_kernels(e.optimizer, e.model, CPU)
    assert make_capturable(e.optimizer, CPU) is None
    run_steps(e)
    [group] = ways.make_portable_state(e.optimizer.state_dict())["param_groups"]
    assert (group["fused"], group["foreach"], group["capturable"]) == (None, None, False)
    assert type(group["lr"]) is float
    saved = copy.deepcopy(
        (e.model.state_dict(), ways.make_portable_state(e.optimizer.state_dict()))
    )
    again, plain = (resume_optimizer(*copy.deepcopy(saved)) for _ in range(2))
    enable_fused_kernels(again.optimizer, again.model, CPU)
    for a, b in zip(run_steps(again), run_steps(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_of_a_snapshot_only_what_the_experiment_changed_is_not_taken() -> None:
    """Others may be of a cycle, or count steps."""
    then = experiment("AdamW", weight_decay=0.0)
    saved = OptimizerFlags(then.optimizer)
    then.optimizer.param_groups[0] |= {"betas": (0.7, 0.9), "count": 3}
    now = experiment("AdamW", weight_decay=0.5, foreach=True)
    state = OptimizerFlags(now.optimizer).merge_new_settings(
        saved.make_portable_state(then.optimizer.state_dict()), saved.settings
    )
    now.optimizer.load_state_dict(state)
    [group] = now.optimizer.param_groups
    assert (group["weight_decay"], group["foreach"]) == (0.5, True)
    assert (group["betas"], group["count"]) == ((0.7, 0.9), 3)


def resume_optimizer(model: dict[str, torch.Tensor], optimizer: dict[str, object]) -> Experiment:
    e = experiment("Adam")
    e.model.load_state_dict(model)
    e.optimizer.load_state_dict(optimizer)
    return e


@pytest.mark.parametrize("make", ["Adagrad", "SGD", "Rprop"])
def test_who_can_be_captured(make: str) -> None:
    reason = make_capturable(experiment(make).optimizer, CPU)
    can = make == "Rprop"  # it has a setting for it
    assert (reason is None) == can
    assert can or f"{make} keeps state of its step on the host" == reason


@pytest.mark.parametrize("make", ["Adam", "SGD"])
def test_restored_state_has_the_order_in_memory_of_its_parameters(make: str) -> None:
    """A snapshot keeps numbers and no order; fused kernels go through memory as it is."""

    def build() -> Experiment:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        extra = {"momentum": 0.9} if make == "SGD" else {}
        optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.1, **extra)
        return Experiment(model, optimizer, nn.functional.mse_loss, None)

    def train(e: Experiment) -> torch.Tensor:
        enable_fused_kernels(e.optimizer, e.model, GPU if make == "SGD" else CPU)
        for _ in range(2):
            e.model(pictures).square().mean().backward()
            e.optimizer.step()
            e.optimizer.zero_grad()
        return e.model.weight.detach()

    pictures = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    undisturbed, resumed = build(), build()
    train(undisturbed)
    saved = copy.deepcopy(undisturbed.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            state[key] = value.contiguous()  # as it comes out of a file
    resumed.model.load_state_dict(undisturbed.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    match_state_layout(resumed.optimizer)
    torch.testing.assert_close(train(resumed), train(undisturbed))
