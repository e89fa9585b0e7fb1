"""The step without torch's label is the same step, and hooks and profilers still see it."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

from echelon.experiment.optimizer_step import UnprofiledStep

OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(3))
    made.grad = torch.tensor([1.0, 2.0, 3.0])
    return made


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_the_same_step(kind: type[torch.optim.Optimizer]) -> None:
    ours, theirs = parameter(), parameter()
    step, expected = UnprofiledStep(kind([ours], lr=0.1)), kind([theirs], lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        step()
        expected.step()
    assert torch.equal(ours, theirs)


def test_hooks_are_called_whenever_they_are_registered() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    step = UnprofiledStep(optimizer)
    calls: list[str] = []
    step()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step()
    assert calls == ["before", "after"]


def test_a_profiler_sees_the_label() -> None:
    step = UnprofiledStep(torch.optim.SGD([parameter()], lr=0.1))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    assert "Optimizer.step#SGD.step" in {event.name for event in seen.events()}


def test_a_schedule_of_torchs_own_counts_the_steps() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    schedule = StepLR(optimizer, step_size=1)
    UnprofiledStep(optimizer)()
    schedule.step()  # warns, and pytest makes that an error, if no step was counted
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
