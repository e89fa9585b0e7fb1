"""The order of samples: one to one, even, the same at every world size, free to start anywhere."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echelon.data import sample_order
from echelon.data.sample_order import (
    EpochOrder,
    SampleRange,
    compute_share,
    count_batches,
    map_positions,
)

GOLDEN_TEN = [6, 3, 4, 2, 1, 8, 7, 5, 9, 0]
GOLDEN_BILLION = [219946932, 754685093, 311741677]
GOLDEN_TRILLION = [795463209678, 527240521069, 144002692927]


def map_epoch(size: int, seed: int = 0, epoch: int = 0) -> Tensor:
    return map_positions(torch.arange(size), size, seed, epoch)


def excess(counts: Iterable[int], cells: int) -> float:
    """Chi-square of even counts, in standard deviations above what chance gives.

    ``counts`` may leave out empty cells.
    """
    seen = list(counts)
    expected = sum(seen) / cells
    chi = sum((n - expected) ** 2 for n in seen) / expected + (cells - len(seen)) * expected
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


# --- one to one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_every_sample_once_at_every_small_size(seed: int) -> None:
    for size in range(1, 301):
        assert sorted(map_epoch(size, seed).tolist()) == list(range(size)), size


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 10**6, 2**20 + 7])
def test_every_sample_once_at_large_sizes(size: int) -> None:
    assert torch.equal(map_epoch(size, seed=3, epoch=5).sort().values, torch.arange(size))


def map_by_hand(position: int, size: int, seed: int, epoch: int) -> int:
    """The same function in whole numbers of any length, which cannot overflow."""
    bits = max(1, (size - 1).bit_length())
    keys = sample_order._derive_keys(seed, epoch)
    value = position
    while True:
        for factor, term in list(zip(keys[::2], keys[1::2], strict=True))[
            : sample_order._choose_rounds(bits)
        ]:
            value = (value * (factor | 1) + term) % 2**bits
            value ^= value >> max(1, bits // 2)
        if value < size:
            return value


SIZES = st.one_of(
    st.integers(1, 2**40),
    st.builds(lambda bits, off: max(1, 2**bits + off), st.integers(0, 40), st.integers(-2, 2)),
)


@settings(max_examples=150)
@given(size=SIZES, seed=st.integers(), epoch=st.integers(0, 10**6), data=st.data())
def test_torch_wraps_as_arithmetic_by_hand_says(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    drawn = map_positions(torch.tensor(positions), size, seed, epoch).tolist()
    assert drawn == [map_by_hand(p, size, seed, epoch) for p in positions]


WORDS_END = st.sampled_from([2**31, 2**32])
"""Where samples, or the size itself, no longer fit 32 bits with and without a sign."""


@settings(max_examples=150)
@given(end=WORDS_END, off=st.integers(-3, 3), seed=st.integers(), data=st.data())
def test_it_is_exact_where_a_word_ends(end: int, off: int, seed: int, data: st.DataObject) -> None:
    size = end + off
    at_borders = st.builds(
        lambda border, step: min(max(0, border + step), size - 1),
        st.sampled_from([0, 2**30, 2**31, 2**32]),
        st.integers(-3, 3),
    )
    positions = data.draw(st.lists(at_borders | st.integers(0, size - 1), min_size=1, max_size=20))
    drawn = map_positions(torch.tensor(positions), size, seed, 0).tolist()
    assert drawn == [map_by_hand(p, size, seed, 0) for p in positions]


@pytest.mark.parametrize("size", [3, 5, 9, 17, 2**31 - 1, 2**31 + 1, 2**32 + 1])
@pytest.mark.slow
def test_a_position_outside_the_epoch_does_not_walk_for_ever(size: int) -> None:
    """Of few samples, some walk in a circle without one inside."""
    domain = 1 << (size - 1).bit_length()
    outside = torch.arange(size, min(domain, size + 1000))
    for seed in range(50):
        assert map_positions(outside, size, seed, 0).max() < domain


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 10**12, 2**40])
def test_no_two_positions_meet_at_sizes_too_large_to_enumerate(size: int) -> None:
    positions = torch.cat([torch.arange(50_000), torch.arange(size - 50_000, size)])
    drawn = map_positions(positions, size, seed=1, epoch=1)
    assert drawn.min() >= 0
    assert drawn.max() < size
    assert len(set(drawn.tolist())) == positions.numel()


def test_the_order_is_a_promise_to_old_snapshots() -> None:
    assert map_epoch(10, seed=0, epoch=0).tolist() == GOLDEN_TEN
    far = torch.tensor([0, 1, 10**9 - 1])
    assert map_positions(far, 10**9, seed=42, epoch=7).tolist() == GOLDEN_BILLION
    assert map_positions(far, 10**12, seed=42, epoch=7).tolist() == GOLDEN_TRILLION


def test_shape_dtype_and_input_are_kept() -> None:
    positions = torch.arange(24).view(2, 3, 4).transpose(0, 2)
    before = positions.clone()
    drawn = map_positions(positions, 1000, 0, 0)
    assert drawn.shape == positions.shape
    assert drawn.dtype == torch.int64
    assert torch.equal(positions, before)
    assert torch.equal(drawn.flatten(), map_positions(positions.flatten(), 1000, 0, 0))
    assert map_positions(torch.tensor(3), 7, 0, 0).shape == ()
    assert map_positions(torch.arange(0), 7, 0, 0).shape == (0,)


# --- even ---------------------------------------------------------------------------------------
# Deterministic, so a bound of 4 standard deviations fails only for cause; half the rounds do fail.


@pytest.mark.parametrize("size", [3, 4, 5, 6])
@pytest.mark.slow
def test_every_permutation_of_few_samples_comes_equally_often(size: int) -> None:
    epochs = 3000
    orders = Counter(tuple(map_epoch(size, 1, epoch).tolist()) for epoch in range(epochs))
    assert abs(excess(orders.values(), math.factorial(size))) < 4


@pytest.mark.parametrize("size", [8, 13, 16, 33])
@pytest.mark.slow
def test_every_pair_of_samples_comes_equally_often_at_two_positions(size: int) -> None:
    epochs = torch.stack([map_epoch(size, 2, epoch) for epoch in range(2000)])
    for i, j in [(0, 1), (0, size // 2), (1, 3), (0, size - 1), (size // 2 - 1, size // 2)]:
        pairs = (epochs[:, i] * size + epochs[:, j]).bincount()
        assert abs(excess(pairs[pairs > 0].tolist(), size * (size - 1))) < 4, (i, j)


@pytest.mark.parametrize("size", [2**16, 10**6, 10**9, 2**40])
def test_neighbours_are_unrelated(size: int) -> None:
    """Serial correlation, and the spread of steps from one sample to the next."""
    for epoch in range(5):
        drawn = map_positions(torch.arange(2**14), size, 3, epoch)
        for lag in (1, 2, 64, 4096):
            both = torch.stack([drawn[:-lag], drawn[lag:]]).double()
            assert abs(torch.corrcoef(both)[0, 1].item()) * both.shape[1] ** 0.5 < 4
        steps = (drawn[1:] - drawn[:-1]) % size * 256 // size
        assert abs(excess(steps.bincount(minlength=256).tolist(), 256)) < 4


@pytest.mark.parametrize("size", [2**20, 2**31, 2**40])
def test_one_bit_of_the_position_changes_half_of_the_bits(size: int) -> None:
    """Avalanche, for every bit that goes in and every bit that comes out, over epochs."""
    bits = size.bit_length() - 1
    positions = torch.cat([torch.tensor([0]), 2 ** torch.arange(bits)]) + 5 * size // 16
    epochs = torch.stack([map_positions(positions % size, size, 4, epoch) for epoch in range(400)])
    flipped = (epochs[:, 1:] ^ epochs[:, :1]).unsqueeze(2) >> torch.arange(bits) & 1
    bias = (flipped.double().mean(0) - 0.5) / (0.5 / 400**0.5)
    assert bias.abs().max() < 4.5
    assert abs(bias.square().mean() - 1) < 0.2


@pytest.mark.parametrize("size", [10**4, 2**17 + 7])
def test_neighbouring_epochs_and_seeds_share_no_more_places_than_chance(size: int) -> None:
    orders = [map_epoch(size, seed, epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 8  # chance gives one on average
        correlation = torch.corrcoef(torch.stack([one, other]).double())[0, 1].item()
        assert abs(correlation) * size**0.5 < 4


# --- shares -------------------------------------------------------------------------------------


def test_shares_join_to_the_global_batch_and_differ_by_at_most_one() -> None:
    for size, batch_size, world in itertools.product(range(18), range(1, 10), range(1, 6)):
        joined: list[int] = []
        for batch in range(count_batches(size, batch_size)):
            shares = [compute_share(batch, batch_size, size, rank, world) for rank in range(world)]
            lengths = [len(s) for s in shares]
            assert max(lengths) - min(lengths) <= 1
            assert lengths[0] > 0, "buffers are rank 0's, so it sees a sample in every step"
            assert sum(lengths) == min(batch_size, size - batch * batch_size)
            joined += [p for s in shares for p in range(s.start, s.stop)]
        assert joined == list(range(size))


def test_a_batch_past_the_end_is_empty() -> None:
    assert compute_share(3, 4, 10, 0, 2) == SampleRange(10, 10)


def batches(one: EpochOrder, first: int = 0) -> list[list[int]]:
    """One list of samples per global batch."""
    found: list[list[int]] = []
    for indices, counts in one.iter_blocks(first):
        assert indices.dtype == torch.int64
        assert indices.numel() == sum(counts)
        found += [part.tolist() for part in torch.split(indices, counts)]
    return found


def join_shares(size: int, batch_size: int, world: int, shuffle: bool) -> list[list[int]]:
    """The global batches, with the ranks' parts joined in turn."""
    ranks = [
        batches(EpochOrder(size, batch_size, rank, world, 5, 1, shuffle)) for rank in range(world)
    ]
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_global_order_is_the_same_at_every_world_size(shuffle: bool) -> None:
    for size, batch_size in itertools.product(range(1, 18), range(1, 10)):
        expected = map_epoch(size, 5, 1) if shuffle else torch.arange(size)
        for world in range(1, 6):
            found = join_shares(size, batch_size, world, shuffle)
            assert found == [part.tolist() for part in torch.split(expected, batch_size)]


@pytest.mark.parametrize(("batch_size", "world"), [(32, 3), (7, 8), (100_000, 2), (1024, 1)])
@pytest.mark.slow
def test_long_epochs_pass_through_many_blocks(batch_size: int, world: int) -> None:
    size = 250_003
    found = join_shares(size, batch_size, world, shuffle=True)
    assert found == [part.tolist() for part in torch.split(map_epoch(size, 5, 1), batch_size)]


def test_an_epoch_resumes_at_any_batch() -> None:
    one = EpochOrder(100_003, 64, 1, 3, seed=9, epoch=2)
    all_of_it = batches(one)
    for first in (0, 1, 17, 700, len(all_of_it) - 1, len(all_of_it), len(all_of_it) + 5):
        assert batches(one, first) == all_of_it[first:]


def test_runs_of_batches_are_the_same_on_every_rank() -> None:
    runs = {
        tuple(len(counts) for _, counts in EpochOrder(200_001, 10, rank, 4, 0, 0).iter_blocks())
        for rank in range(4)
    }
    assert len(runs) == 1


def test_blocks_are_bounded() -> None:
    lengths = [b.numel() for b, _ in EpochOrder(300_000, 32, 0, 1, 0, 0).iter_blocks()]
    assert lengths[0] <= 1024
    assert max(lengths) <= 2**17


def test_an_empty_data_set_has_no_batches() -> None:
    assert batches(EpochOrder(0, 4, 0, 1, 0, 0)) == []


@pytest.mark.parametrize(("batch_size", "rank", "world"), [(0, 0, 1), (4, 2, 2), (4, -1, 2)])
def test_an_impossible_share_is_refused(batch_size: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="no rank takes a share"):
        EpochOrder(10, batch_size, rank, world, 0, 0)


# --- cost ---------------------------------------------------------------------------------------


def test_a_far_position_of_a_billion_costs_what_the_first_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in samples that are drawn before the first batch is there; ``benchmarks/order.py``
    measures the time."""
    drawn: list[int] = []

    def count(positions: Tensor, size: int, seed: int, epoch: int) -> Tensor:
        drawn.append(positions.numel())
        return map_positions(positions, size, seed, epoch)

    monkeypatch.setattr(sample_order, "map_positions", count)
    one = EpochOrder(10**9, 256, 3, 8, seed=0, epoch=0)
    for first_batch in (0, 3_900_000):
        next(one.iter_blocks(first_batch))
    assert drawn == [1024, 1024]
