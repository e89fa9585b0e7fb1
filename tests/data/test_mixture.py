"""Several data sets drawn from with weights, as a function of position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import echelon
from echelon.data.data_layout import find_layout_change
from echelon.data.epoch_plan import MixturePlan, make_epoch_plan
from echelon.data.formats.reader import ChunkTable
from echelon.data.mixture import PATTERN_SLOTS, Mixture, MixtureDraws, make_pattern
from echelon.errors import EchelonError

CPU = torch.device("cpu")
PINNED = [20, 1, 24, 18, 23, 3, 6, 11, 19, 2, 5, 9]


class Chunked(TensorDataset):
    """Samples in chunks of 10, with windows of three of them."""

    window_bytes = 30

    @property
    def chunks(self) -> ChunkTable:
        starts = np.arange(0, len(self) + 1, 10)
        return ChunkTable(starts, np.full(len(starts) - 1, 10))


def make_mixture(
    sizes: dict[str, int], weights: dict[str, float] | None = None, samples: int | None = None
) -> Mixture:
    sources = {name: TensorDataset(torch.arange(size)) for name, size in sizes.items()}
    return echelon.data.mix(sources, weights, samples)


def draw(mixture: Mixture, count: int, first: int = 0, seed: int = 3) -> Any:
    return MixtureDraws(mixture, seed).find_rows(np.arange(first, first + count))


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8))
def test_the_weights_hold_in_every_stretch(weights: list[float]) -> None:
    pattern = make_pattern(weights)
    assert pattern.counts.sum() == len(pattern.owners) == PATTERN_SLOTS
    shares = np.array(weights) / sum(weights)
    assert np.abs(pattern.counts / PATTERN_SLOTS - shares).max() < len(weights) / PATTERN_SLOTS
    for source, count in enumerate(pattern.counts):
        so_far = np.cumsum(pattern.owners == source)
        expected = np.arange(1, PATTERN_SLOTS + 1) * count / PATTERN_SLOTS
        assert np.abs(so_far - expected).max() < len(weights)
        assert (pattern.ranks[pattern.owners == source] == np.arange(count)).all()


def test_every_sample_of_a_source_comes_before_any_comes_again() -> None:
    mixture = make_mixture({"a": 7, "b": 100}, {"a": 0.5, "b": 0.5})
    draws = draw(mixture, 400)
    rows, passes = draws % len(mixture), draws // len(mixture)
    of_a = rows < 7
    assert abs(int(of_a.sum()) - 200) <= 1
    for number in range(28):
        assert sorted(rows[of_a & (passes == number)]) == list(range(7))
    orders = {tuple(rows[of_a & (passes == number)]) for number in range(10)}
    assert len(orders) > 5  # each pass has an order of its own


def test_draws_are_pinned() -> None:
    """A resumed run goes on in this order."""
    mixture = make_mixture({"a": 5, "b": 20}, {"a": 1, "b": 3})
    assert draw(mixture, 12).tolist() == PINNED
    assert draw(mixture, 5, first=7).tolist() == PINNED[7:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [4, 7])
def test_ranks_take_the_same_batches_at_any_world_size(world_size: int, batch_size: int) -> None:
    mixture = make_mixture({"a": 9, "b": 31}, {"a": 0.3, "b": 0.7}, samples=45)
    plan = make_epoch_plan(len(mixture), batch_size, 3, data=mixture)
    assert isinstance(plan, MixturePlan)
    for epoch, first in ((0, 0), (1, 2)):
        of_ranks = []
        for rank in range(world_size):
            order = plan.make_order(epoch, rank, world_size, CPU)
            batches = [
                piece.tolist()
                for draws, counts in order.iter_draws(first)
                for piece in torch.split(draws, counts)
            ]
            of_ranks.append(batches)
        shares = (share for batch in zip(*of_ranks, strict=True) for share in batch)
        begin = epoch * 45 + first * batch_size
        whole = draw(mixture, (epoch + 1) * 45 - begin, begin).tolist()
        assert [row for share in shares for row in share] == whole


def test_a_source_in_chunks_is_shuffled_in_its_windows() -> None:
    chunked, plain = Chunked(torch.arange(200)), TensorDataset(torch.arange(50))
    mixture = echelon.data.mix({"a": chunked, "b": plain}, {"a": 0.5, "b": 0.5})
    rows = draw(mixture, 400) % len(mixture)
    of_a = rows[rows < 200]
    assert sorted(of_a[:200]) == list(range(200))
    assert len({row // 10 for row in of_a[:30].tolist()}) == 3  # one window at a time


def test_samples_and_their_places() -> None:
    mixture = make_mixture({"a": 3, "b": 4})
    assert len(mixture) == mixture.epoch_samples == 7
    assert [int(mixture[row][0]) for row in range(7)] == [0, 1, 2, 0, 1, 2, 3]
    assert mixture.locate(4) == "b: sample 1"
    with pytest.raises(IndexError, match="no sample 7"):
        mixture[7]


def test_another_mixture_is_another_layout() -> None:
    then, now = (
        make_epoch_plan(10, 2, 0, data=make_mixture({"a": 5, "b": 5}, {"a": weight, "b": 1})).layout
        for weight in (1, 3)
    )
    assert find_layout_change(then, then) is None
    said = find_layout_change(then, now)
    assert said == (
        "it mixes a 0.75 of 5, b 0.25 of 5; 10 an epoch, not a 0.5 of 5, b 0.5 of 5; 10 an epoch"
    )


def test_all_faults_of_a_mixture_at_once() -> None:
    sources: dict[str, Any] = {"web": [], "code": range(5), "books": iter(()), "news": [1]}
    weights = {"code": 1.0, "boks": 1.0, "news": 1e-9, "web": 1}
    with pytest.raises(EchelonError) as raised:
        echelon.data.mix(sources, weights, epoch_samples=0)
    said = [fault.what for fault in raised.value.faults]
    assert said == [
        "the source web has no samples",
        "the source books is a tuple_iterator, without a length or samples by number",
        "there is a weight of 'boks', which is no source",
        "the source books has no weight",
        "the source news has the weight 1e-09 of 3 in all",
        "epoch_samples=0",
    ]
    with pytest.raises(EchelonError, match="a sampler is given beside a mixture"):
        make_epoch_plan(7, 2, 0, sampler=range(7), data=make_mixture({"a": 3, "b": 4}))
