"""The tests' own worlds: what runs in the test process does not reach them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from worlds import spawn_world

pytestmark = pytest.mark.slow


def nested(x: Tensor, depth: int) -> Tensor:
    """Differentiated in nested backward passes, for which autograd starts threads at some depth."""
    if depth == 0:
        return x.tanh()
    result: Tensor = checkpoint(nested, x, depth - 1, use_reentrant=True)
    return result


def compute_gradient() -> float:
    x = torch.ones(2, requires_grad=True)
    nested(x, 70).sum().backward()
    assert x.grad is not None
    return x.grad[0].item()


def compute_gradient_in_rank(rank: int, master: str) -> float:
    return compute_gradient()


def test_a_backward_pass_in_the_test_process_does_not_reach_the_ranks(tmp_path: Path) -> None:
    here = compute_gradient()
    ranks = spawn_world(2, compute_gradient_in_rank, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].output
    assert [rank.value for rank in ranks] == [here, here]


def report_inherited(rank: int, master: str) -> tuple[str, str | None, str | None]:
    return os.getcwd(), os.environ.get("FROM_TEST"), os.environ.get("FROM_WORLD")


def test_a_rank_has_the_folder_and_the_variables_of_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_TEST", "a")
    [rank] = spawn_world(1, report_inherited, tmp_path, env={"FROM_WORLD": "b"})
    assert rank.value == [str(tmp_path), "a", "b"], rank.output
