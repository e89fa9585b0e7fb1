"""Batches of similar length under a budget of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import echelon
from echelon.data.data_layout import find_layout_change
from echelon.data.epoch_plan import make_epoch_plan
from echelon.data.token_budget import TokenBudgetSampler
from echelon.errors import EchelonError

CPU = torch.device("cpu")
LENGTHS = np.random.default_rng(5).integers(1, 60, 500)


def make_sampler(lengths: Any, seed: int = 0, **options: Any) -> TokenBudgetSampler:
    generator = torch.Generator().manual_seed(seed)
    return echelon.data.TokenBudgetSampler(lengths, generator=generator, **options)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=200),
    st.integers(50, 500),
    st.none() | st.integers(1, 20),
)
def test_every_sample_once_and_no_batch_over_the_budget(
    lengths: list[int], max_tokens: int, max_samples: int | None
) -> None:
    sampler = make_sampler(lengths, max_tokens=max_tokens, max_samples=max_samples)
    epochs = [list(sampler) for _ in range(2)]
    padded = 0
    for batches in epochs:
        assert len(batches) == len(sampler)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        sizes = [len(batch) * max(1, *(lengths[i] for i in batch), 0) for batch in batches]
        assert max(sizes) <= max_tokens
        assert max(map(len, batches)) <= (max_samples or len(lengths))
        padded = max(padded, sum(sizes))
    first, second = ([sorted(len(batch) for batch in batches)] for batches in epochs)
    assert first == second, "an epoch has batches of the same sizes as any other"
    tokens = sum(max(1, length) for length in lengths)
    assert 1 - tokens / padded <= sampler.padding_share + 1e-9 < 1


def test_lengths_in_a_batch_are_similar_and_epochs_differ() -> None:
    sampler = make_sampler(LENGTHS, max_tokens=600)
    first, second = list(sampler), list(sampler)
    spreads = [LENGTHS[batch].max() - LENGTHS[batch].min() for batch in first]
    assert np.mean(spreads) < 6
    assert sampler.padding_share < 0.1
    again = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert len(again) < 3, "samples meet others, but for buckets of one batch"
    means = np.array([LENGTHS[batch].mean() for batch in first])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4, "batches are shuffled"
    assert list(make_sampler(LENGTHS, max_tokens=600)) == first


def test_samples_of_one_length_fill_batches() -> None:
    sampler = make_sampler([100] * 25, max_tokens=1000)
    assert sorted(len(batch) for batch in sampler) == [5, 10, 10]
    assert sampler.padding_share == 0
    # What is left of a short bucket begins a batch of the next one, unless it is too much for it.
    assert sorted(map(len, make_sampler([1] * 3 + [10] * 5, max_tokens=40))) == [4, 4]
    assert sorted(map(len, make_sampler([1] * 30 + [10] * 5, max_tokens=40))) == [1, 4, 30]


def test_batches_are_pinned() -> None:
    """A resumed run goes on with these batches."""
    sampler = make_sampler([3, 9, 4, 4, 8, 3, 1, 9], max_tokens=20)
    assert list(sampler) == [[6, 0, 5, 3, 2], [7], [4, 1]]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_take_the_same_batches_at_any_world_size(world_size: int) -> None:
    data = torch.zeros(len(LENGTHS))

    def read(world_size: int, epoch: int, first: int) -> list[list[int]]:
        sampler = TokenBudgetSampler(LENGTHS, max_tokens=400)
        plan = make_epoch_plan(len(data), 7, 3, batch_sampler=sampler)
        assert plan.locate(len(sampler) + 4, 0) == (1, 4), "steps say where a run is"
        orders = [plan.make_order(epoch, rank, world_size, CPU) for rank in range(world_size)]
        shares = [
            [
                piece.tolist()
                for rows, counts in order.iter_draws(first)
                for piece in rows.split(counts)
            ]
            for order in orders
        ]
        return [[row for share in batch for row in share] for batch in zip(*shares, strict=True)]

    whole = read(1, 1, 0)
    assert sorted(row for batch in whole for row in batch) == list(range(len(data)))
    assert read(world_size, 1, 0) == whole
    assert read(world_size, 1, 4) == whole[4:]
    assert read(1, 0, 0) != whole


def test_it_serves_a_loader_of_torch() -> None:
    rows: Any = range(8)
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=make_sampler([2] * 8, max_tokens=6))
    assert sorted(len(batch) for batch in loader) == [2, 3, 3]


def test_another_budget_is_another_layout() -> None:
    then, now = (
        make_epoch_plan(
            500, 7, 3, batch_sampler=TokenBudgetSampler(LENGTHS, max_tokens=budget, max_samples=9)
        ).layout
        for budget in (400, 500)
    )
    said = str(find_layout_change(then, now))
    tokens = f"500 samples of {LENGTHS.sum():,} tokens"
    assert said.startswith(f"it has {tokens}, in ")
    assert said.endswith("batches of at most 400 tokens and 9 samples")


def test_what_is_refused() -> None:
    def find_faults(lengths: Any, **options: Any) -> list[str]:
        with pytest.raises(EchelonError) as caught:
            TokenBudgetSampler(lengths, **options)
        return [fault.what for fault in caught.value.faults]

    assert find_faults([], max_tokens=0, max_samples=1.5) == [
        "max_tokens=0",
        "max_samples=1.5",
        "lengths is empty",
    ]
    assert find_faults([1.0, 2.0], max_tokens=4) == ["lengths has numbers of type float64"]
    assert find_faults([[1], [2]], max_tokens=4) == ["lengths has the shape (2, 1)"]
    assert find_faults([1, -2], max_tokens=4) == ["the length of sample 1 is -2"]
    assert find_faults([3, 5, 9000], max_tokens=4) == [
        "sample 2 has 9,000 tokens, more than max_tokens=4; 2 samples are longer than that"
    ]
    with pytest.raises(EchelonError, match="lengths of 3 samples, but the data has 4"):
        make_epoch_plan(4, 2, 0, batch_sampler=TokenBudgetSampler([1, 2, 3], max_tokens=4))
