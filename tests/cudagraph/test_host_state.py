"""What a step changes on the host is seen, wherever the user keeps it."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.cudagraph.capture import find_hook_owner
from echelon.cudagraph.host_state import find_host_change, read_host_state
from echelon.experiment.definition import Experiment

CALLS = 0
Change = Callable[[], Any]


def experiment(loss: Any = nn.functional.mse_loss, predict: Any = None) -> Experiment:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Experiment(model, optimizer, loss, None, predict=predict)


def find_change_after(e: Experiment, change: Change) -> str | None:
    before = read_host_state(e)
    change()
    return find_host_change(before, read_host_state(e))


class Counts:
    def __init__(self) -> None:
        self.n = 0
        self.gone = float("nan")

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) * self.n

    def tick(self) -> None:
        self.n += 1


def counting(output: Tensor, target: Tensor, *_: Any) -> Tensor:
    return nn.functional.mse_loss(output, target) * CALLS


def test_a_counter_in_the_loss() -> None:
    loss = Counts()
    assert (
        find_change_after(experiment(loss), loss.tick) == "the loss's n changes from step to step"
    )
    assert find_change_after(experiment(loss), lambda: None) is None


def test_a_counter_in_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    change = functools.partial(monkeypatch.setitem, globals(), "CALLS", 1)
    expected = "the predict's global CALLS changes from step to step"
    predict: Any = functools.partial(counting, torch.zeros(1))
    assert find_change_after(experiment(predict=predict), change) == expected


@pytest.mark.parametrize("kept", [[1], {"a": [1]}, deque([1]), torch.ones(1), Counts()])
def test_what_a_closure_holds(kept: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) * len(str(kept))

    changes: dict[type, Change] = {
        list: lambda: kept.append(2),
        dict: lambda: kept["a"].append(2),
        deque: lambda: kept.append(2),
        Tensor: lambda: kept.add_(1),
        Counts: lambda: kept.tick(),
    }
    assert (
        find_change_after(experiment(loss), changes[type(kept)])
        == "the loss's kept changes from step to step"
    )


def test_what_a_module_remembers() -> None:
    e = experiment()
    e.model.history = [0.5]
    e.model[1].rate = 0.5
    assert find_change_after(e, lambda: e.model.history.append(0.4)) == (
        "the model's history changes from step to step"
    )
    assert find_change_after(e, lambda: setattr(e.model[1], "rate", 0.4)) == (
        "the model's 1.rate changes from step to step"
    )


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_numbers(draw: Change) -> None:
    assert find_change_after(experiment(), draw) == "the step draws random numbers on the host"


def test_a_step_on_its_own_changes_nothing() -> None:
    assert find_change_after(experiment(), lambda: None) is None


def test_hooks_of_the_user() -> None:
    e = experiment()
    assert find_hook_owner(e.model, [e.optimizer]) is None
    e.model[0].weight.register_hook(lambda grad: grad)
    assert find_hook_owner(e.model, [e.optimizer]) == "the model's 0.weight"
    e.model[1].register_forward_hook(lambda *_: None)
    assert find_hook_owner(e.model, [e.optimizer]) == "the model's 1"
    e.optimizer.register_step_post_hook(lambda *_: None)
    assert find_hook_owner(e.model, [e.optimizer]) == "the optimizer"
