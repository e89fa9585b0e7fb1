"""A training without compilation never imports torch._dynamo, and one with it finds it as ever."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import join_gloo_group, spawn_world

from echelon.utils.deferred_dynamo import defer_dynamo, is_dynamo_imported

pytestmark = pytest.mark.slow


def train(model: Any) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def train_twice(rank: int, master: str, then: str) -> list[list[float]]:
    """Without and with the module; the same numbers are returned from both."""
    defer_dynamo()
    join_gloo_group(rank, 2, master)
    before = train(torch.nn.parallel.DistributedDataParallel(make_model()))
    assert not is_dynamo_imported()
    assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
    held = sys.modules["torch._dynamo"]
    if then == "submodule":
        config = importlib.import_module("torch._dynamo.config")
        assert config is sys.modules["torch._dynamo.config"]
        assert config is torch._dynamo.config
        assert held.config is config  # who imported the stand-in sees the module itself
    after = train(torch.compile(make_model(), backend="eager"))
    assert is_dynamo_imported()
    assert sys.modules["torch._dynamo"] is torch._dynamo
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    return [before, after]


@pytest.mark.parametrize("then", ["submodule", "compile"])
def test_it_is_imported_when_something_is_compiled(tmp_path: Path, then: str) -> None:
    for ended in spawn_world(2, partial(train_twice, then=then), tmp_path):
        assert ended.code == 0, ended.output
        assert ended.value[0] == pytest.approx(ended.value[1])
