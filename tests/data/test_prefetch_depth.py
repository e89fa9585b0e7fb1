"""How far loader processes work ahead: further while the training waits, less without memory."""

from __future__ import annotations

import pytest
import torch
from random_samples import SIZE, ProcessNumbers

from echelon.data import prefetch_depth
from echelon.data.batches import DatasetSource
from echelon.data.prefetch_depth import MAX_DEPTH, PrefetchDepth
from echelon.data.sample_order import EpochOrder

CPU = torch.device("cpu")
GB = 1 << 30


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that batches may take; the machine's own may change at any time."""
    found = [GB]
    monkeypatch.setattr(prefetch_depth, "_measure_budget_bytes", lambda: found[0])
    monkeypatch.setattr(prefetch_depth, "_CHECK_EVERY_S", 0.0)
    return found


def note(depth: PrefetchDepth, waited_s: float, batches: int, size_bytes: int = 1) -> int:
    for _ in range(batches):
        depth.note_batch(waited_s, size_bytes)
    return depth.depth


def test_it_grows_while_the_training_waits(budget: list[int]) -> None:
    depth = PrefetchDepth(2)
    assert note(depth, 0.0, 50) == 2
    assert note(depth, 1.0, 3) == 2
    assert note(depth, 1.0, 1) == 3
    assert depth.max_batches == 6
    assert note(depth, 1.0, 1000) == MAX_DEPTH
    assert note(depth, 0.0, 1000) == MAX_DEPTH


def test_a_few_late_batches_are_the_start_of_an_epoch(budget: list[int]) -> None:
    depth = PrefetchDepth(2)
    for _ in range(20):
        note(depth, 1.0, 2)
        assert note(depth, 0.0, 16) == 2


def test_its_bytes_are_bounded(budget: list[int]) -> None:
    depth = PrefetchDepth(2)
    assert note(depth, 1.0, 1000, GB // 8) == 4
    budget[0] = GB // 2  # something else takes memory
    assert note(depth, 0.0, 1, GB // 8) == 2
    budget[0] = 0
    assert note(depth, 1.0, 100, GB // 8) == 1


def test_that_of_the_user_stays(budget: list[int]) -> None:
    depth = PrefetchDepth(2, 5)
    assert note(depth, 1.0, 100, GB) == 5


def test_the_budget_of_this_machine_is_bounded() -> None:
    assert 0 <= prefetch_depth._measure_budget_bytes() <= GB


def test_loader_processes_are_asked_for_as_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every batch comes once, in order, while the depth goes up and down."""
    source = DatasetSource(ProcessNumbers(), 2)
    processes = source._processes
    assert processes is not None
    monkeypatch.setattr(processes._depth, "note_batch", lambda waited_s, size_bytes: None)
    under_way = []
    for epoch, depth in enumerate((1, 7, 3, 16, 1)):
        processes._depth.depth = depth
        rows = []
        order = EpochOrder(SIZE, 1, 0, 1, 0, epoch)
        for batch in source.iter_batches(order, 0, CPU):
            rows += batch.data[:, 0].tolist()
            under_way.append(processes._requests._under_way <= 2 * depth)
        expected, _ = next(order.iter_blocks())
        assert rows == expected.tolist()
    assert all(under_way)
    source.close()
