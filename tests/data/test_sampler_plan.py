"""The experiment's own samplers: a global order that every rank cuts its share out of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from random_samples import SIZE, RandomSamples, draw_numbers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from echelon.data.batches import DatasetSource, TensorSource, make_source
from echelon.data.epoch_plan import EpochPlan, make_epoch_plan
from echelon.errors import EchelonError
from echelon.snapshot.state import pack_rng_state

CPU = torch.device("cpu")


def read_epoch(plan: EpochPlan, epoch: int, world_size: int = 1, first: int = 0) -> list[list[int]]:
    """The global batches from a batch on, the shares of ranks joined."""
    shares = [
        [
            share.tolist()
            for indices, counts in plan.make_order(epoch, rank, world_size, CPU).iter_blocks(first)
            for share in indices.split(counts)
        ]
        for rank in range(world_size)
    ]
    return [list(chain.from_iterable(batch)) for batch in zip(*shares, strict=True)]


class Drawing:
    """Draws from a generator that is seeded for it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        if self.kind == "random":
            return iter(random.sample(range(10), 10))
        if self.kind == "numpy":
            return iter(np.random.permutation(10))
        return iter(torch.randperm(10))  # zero-dimensional tensors


class Growing:
    """A curriculum: more samples in every epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return min(10, 3 + 2 * self.epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


WEIGHTS = [1.0, 1.0, 8.0, *[0.1] * 7]
SAMPLERS: dict[str, Any] = {
    "weighted": WeightedRandomSampler(WEIGHTS, 12),
    "shuffled": RandomSampler(range(10), generator=torch.Generator()),
    "python": Drawing("random"),
    "numpy": Drawing("numpy"),
    "torch": Drawing("torch"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_epoch_is_the_same_whenever_and_wherever_it_is_read(name: str) -> None:
    plan = make_epoch_plan(10, 4, 0, sampler=SAMPLERS[name])
    epochs = [read_epoch(plan, epoch) for epoch in range(3)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, plan.epoch_samples - 8]
    assert epochs[0] != epochs[1]
    draw_numbers()  # the state of the process's own generators says nothing
    again = make_epoch_plan(10, 4, 0, sampler=SAMPLERS[name])
    for world_size in (2, 3):
        assert read_epoch(again, 1, world_size) == epochs[1]
        assert read_epoch(again, 2, world_size, first=1) == epochs[2][1:]
    assert read_epoch(make_epoch_plan(10, 4, 1, sampler=SAMPLERS[name]), 0) != epochs[0]


def test_reading_a_sampler_draws_nothing_of_the_models() -> None:
    before = pack_rng_state()
    read_epoch(make_epoch_plan(10, 4, 0, sampler=RandomSampler(range(10))), 1)
    assert torch.equal(pack_rng_state(), before)


def test_a_list_is_an_order() -> None:
    plan = make_epoch_plan(5, 2, 0, sampler=[4, 3, 3])
    assert read_epoch(plan, 0) == read_epoch(plan, 7) == [[4, 3], [3]]
    assert plan.epoch_samples == 3
    assert plan.locate(step=5, samples=8) == (2, 1)
    assert plan.count_partial_samples(7) == 1


def test_batches_of_a_batch_sampler_are_kept() -> None:
    buckets = [[0, 1, 2], [5], [4, 3]]
    plan = make_epoch_plan(6, 32, 0, batch_sampler=buckets)
    for world_size in (1, 2, 3):
        assert read_epoch(plan, 4, world_size) == buckets
    assert plan.count_batches(3) == 3
    assert plan.locate(step=7, samples=999) == (2, 1)
    assert plan.make_order(0, 1, 2, CPU).count_samples(0) == 3
    shuffled = BatchSampler(RandomSampler(range(10)), 4, drop_last=True)
    plan = make_epoch_plan(10, 32, 0, batch_sampler=shuffled)
    assert [len(batch) for batch in read_epoch(plan, 0)] == [4, 4]
    assert read_epoch(plan, 0) != read_epoch(plan, 1)


def test_epochs_may_grow() -> None:
    plan = make_epoch_plan(10, 4, 0, sampler=Growing())
    assert [plan.count_batches(epoch) for epoch in range(5)] == [1, 2, 2, 3, 3]
    assert plan.locate(step=0, samples=3) == (1, 0)
    assert plan.locate(step=0, samples=3 + 5 + 4) == (2, 1)
    assert plan.locate(step=0, samples=2) == (0, 0)
    assert read_epoch(plan, 2) == [[0, 1, 2, 3], [4, 5, 6]]
    assert read_epoch(plan, 0) == [[0, 1, 2]]


def test_a_sample_that_comes_again_draws_other_numbers() -> None:
    plan = make_epoch_plan(SIZE, 4, 0, sampler=[3, 3, 5, 3, 5, 0])
    drawn = []
    for world_size in (1, 2):
        rows = []
        for number in range(2):
            for rank in range(world_size):
                source = DatasetSource(RandomSamples(), 0)
                order = plan.make_order(0, rank, world_size, CPU)
                rows.append(source.fetch_batch(order, number, CPU).data)
        drawn.append(torch.cat(rows))
    assert torch.equal(*drawn)
    assert drawn[0][:, 0].tolist() == [3, 3, 5, 3, 5, 0]
    assert len(set(drawn[0][:, 1].tolist())) == 6


def test_tensors_follow_a_sampler_too() -> None:
    plan = make_epoch_plan(5, 2, 0, sampler=[4, 3, 3])
    source = TensorSource((torch.arange(5) * 10,), CPU)
    batches = source.iter_batches(plan.make_order(0, 0, 1, CPU), 0, CPU)
    assert [batch.data[0].tolist() for batch in batches if batch.data] == [[40, 30], [30]]


class Forgetful:
    """Goes on where it was, instead of beginning the epoch anew."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(10))


class Lying(Growing):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("field", "sampler", "parts"),
    [
        ("sampler", Forgetful(), ("another order", "set_epoch")),
        ("sampler", [0, 10], ("index 10 in epoch 1", "10 samples", "from 0 to 9")),
        ("sampler", [0, -1], ("index -1",)),
        ("sampler", [[0, 1]], ("gives a list for an index", "batch_sampler")),
        ("sampler", [0.5], ("gives a float for an index",)),
        ("sampler", [], ("gives nothing",)),
        ("batch_sampler", [1, 2], ("gives a int for a batch", "lists of indices")),
        ("batch_sampler", [[1], []], ("an empty batch (number 1)",)),
        ("batch_sampler", [[1], [11]], ("index 11",)),
    ],
)
def test_a_sampler_that_cannot_be_used(field: str, sampler: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(EchelonError) as caught:
        make_epoch_plan(10, 4, 0, **{field: sampler})
    text = str(caught.value)
    assert f"the {field} gives" in text
    assert all(part in text for part in parts), text


def test_an_epoch_of_another_length_than_announced() -> None:
    plan = make_epoch_plan(10, 4, 0, sampler=Lying())
    with pytest.raises(EchelonError, match="3 samples in epoch 2, where 5 were expected"):
        plan.make_order(1, 0, 1, CPU)


# --- a DataLoader instead of data ---


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"shuffle": True, "batch_size": 8}, "loader.dataset, and set trainer.batch_size=8 and"),
        ({"shuffle": False}, "with sampler=loader.sampler, and set trainer.batch_size=1"),
        (
            {"collate_fn": list, "sampler": WeightedRandomSampler(WEIGHTS, 12), "num_workers": 2},
            "loader.dataset, with collate_fn=loader.collate_fn, sampler=loader.sampler, and set "
            "trainer.batch_size=1 and trainer.loader_workers=2",
        ),
        (
            {"batch_sampler": [[0], [1]], "num_workers": 1, "prefetch_factor": 4},
            "with batch_sampler=loader.batch_sampler, loader={'prefetch_factor': "
            "loader.prefetch_factor}, and set trainer.loader_workers=1",
        ),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(3)), 2, False)},
            "with batch_sampler=loader.batch_sampler, and set",
        ),
    ],
)
def test_the_hint_for_a_dataloader_names_all_that_it_has(
    options: dict[str, Any], hint: str
) -> None:
    loader: DataLoader[Any] = DataLoader(RandomSamples(), **options)
    with pytest.raises(EchelonError) as caught:
        make_source(loader, "train_data", 0, CPU)
    [fault] = caught.value.faults
    assert hint in fault.do
