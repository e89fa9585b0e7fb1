"""The order of samples in chunks: one to one, within windows, the same at every world size, free to
start anywhere."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, random_split

from echelon.data import chunk_order
from echelon.data.chunk_order import (
    ChunkedOrder,
    ChunkLookahead,
    ChunkWindows,
    find_chunk_windows,
)
from echelon.data.epoch_plan import make_epoch_plan
from echelon.data.formats.reader import ChunkTable
from echelon.data.sample_order import EpochOrder, map_positions
from echelon.errors import EchelonError

CPU = torch.device("cpu")
GOLDEN_TEN = [1, 4, 3, 2, 5, 6, 0, 8, 7, 9]
GOLDEN_BILLION = [898271364, 191443959, 150598002]


def make_table(lengths: Sequence[int], sample_bytes: int = 1) -> ChunkTable:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return ChunkTable(starts, np.array(lengths, np.int64) * sample_bytes)


def make_order(
    table: ChunkTable, window_bytes: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> ChunkedOrder:
    windows = ChunkWindows(table, window_bytes)
    size = int(table.starts[-1])
    return ChunkedOrder(size, batch_size, rank, world_size, 3, 1, windows=windows)


def batches(order: EpochOrder, first: int = 0) -> list[list[int]]:
    found: list[list[int]] = []
    for indices, counts in order.iter_blocks(first):
        assert indices.dtype == torch.int64
        found += [part.tolist() for part in torch.split(indices, counts)]
    return found


def join(parts: Sequence[Sequence[int]]) -> list[int]:
    return list(itertools.chain(*parts))


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda ls: sum(ls) > 0)
WINDOWS = st.integers(1, 200)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, window=WINDOWS, batch_size=st.integers(1, 20), data=st.data())
def test_every_sample_once_at_any_world_size_and_after_any_resume(
    lengths: list[int], window: int, batch_size: int, data: st.DataObject
) -> None:
    table = make_table(lengths)
    whole = batches(make_order(table, window, batch_size))
    assert sorted(join(whole)) == list(range(sum(lengths)))
    world_size = data.draw(st.integers(2, 5))
    ranks = [
        batches(make_order(table, window, batch_size, rank, world_size))
        for rank in range(world_size)
    ]
    assert [join(parts) for parts in zip(*ranks, strict=True)] == whole
    first = data.draw(st.integers(0, len(whole)))
    assert batches(make_order(table, window, batch_size), first) == whole[first:]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, window=WINDOWS)
def test_a_window_has_whole_chunks_and_at_most_its_bytes(lengths: list[int], window: int) -> None:
    table = make_table(lengths)
    arranged = ChunkWindows(table, window).arrange_epoch(3, 1)
    by_hand: list[list[int]] = []
    for chunk in arranged.chunks.tolist():
        if not by_hand or sum(lengths[c] for c in by_hand[-1]) + lengths[chunk] > window:
            by_hand.append([])
        by_hand[-1].append(chunk)
    drawn = join(batches(make_order(table, window, 7)))
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)
    starts = arranged.window_positions.tolist()
    for chunks, (first, stop) in zip(by_hand, itertools.pairwise(starts), strict=True):
        assert set(chunk_of[drawn[first:stop]].tolist()) == {c for c in chunks if lengths[c]}
        assert sum(lengths[c] for c in chunks) == stop - first


def test_the_order_is_a_promise_to_old_snapshots() -> None:
    assert join(batches(make_order(make_table([3, 0, 4, 3]), 7, 4))) == GOLDEN_TEN
    starts = np.arange(10_001, dtype=np.int64) * 100_000
    order = ChunkedOrder(
        10**9, 3, 0, 1, 42, 7, windows=ChunkWindows(ChunkTable(starts, np.diff(starts)), 10**7)
    )
    far = torch.tensor([0, 1, 10**9 - 1])
    assert order.map_positions(far).tolist() == GOLDEN_BILLION


def test_epochs_seeds_and_windows_are_shuffled_differently() -> None:
    windows = ChunkWindows(make_table([50] * 8), 100)
    orders = [
        join(batches(ChunkedOrder(400, 32, 0, 1, seed, epoch, windows=windows)))
        for seed in range(3)
        for epoch in range(3)
    ]
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 40
    within = [[sample % 50 for sample in orders[0][i : i + 100]] for i in range(0, 400, 100)]
    assert all(one != other for one, other in itertools.combinations(within, 2))


class Chunked(torch.utils.data.Dataset[int]):
    def __init__(self, lengths: Sequence[int], window_bytes: int | None = None) -> None:
        self.chunks = make_table(lengths)
        if window_bytes is not None:
            self.window_bytes = window_bytes

    def __len__(self) -> int:
        return int(self.chunks.starts[-1])

    def __getitem__(self, index: int) -> int:
        return index


def test_the_chunks_of_a_dataset_are_found() -> None:
    small = make_epoch_plan(20, 4, 0, data=Chunked([10, 10]))
    assert type(order := small.make_order(0, 0, 1, CPU)) is EpochOrder
    assert join(batches(order)) == map_positions(torch.arange(20), 20, 0, 0).tolist()
    large = make_epoch_plan(20, 4, 0, data=Chunked([10, 10], 10))
    assert type(order := large.make_order(0, 0, 1, CPU)) is ChunkedOrder
    assert {sample // 10 for sample in join(batches(order))[:10]} in ({0}, {1})
    assert find_chunk_windows([1, 2, 3]) is None


def test_chunks_of_other_data_are_refused() -> None:
    wrong = Chunked([10, 10])
    wrong.chunks, wrong.__class__ = make_table([3]), Longer
    with pytest.raises(EchelonError, match="have 3 samples, but its length is 20"):
        find_chunk_windows(wrong)


class Longer(Chunked):
    def __len__(self) -> int:
        return 20


def test_a_far_position_of_a_billion_costs_what_the_first_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in positions that are mapped, and in memory; `benchmarks/shuffle_quality.py` measures
    the time."""
    mapped: list[int] = []

    def count(positions: torch.Tensor, *arguments: object) -> torch.Tensor:
        mapped.append(positions.numel())
        return map_positions(positions, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chunk_order, "map_positions", count)
    starts = np.arange(25_001, dtype=np.int64) * 40_000
    windows = ChunkWindows(ChunkTable(starts, np.full(25_000, 4 << 20)), 256 << 20)
    order = ChunkedOrder(10**9, 256, 3, 8, 0, 1, windows=windows)
    tracemalloc.start()
    for first in (0, 3_900_000):
        next(order.iter_blocks(first))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(mapped) <= 25_000 + 2 * 1024
    assert peak < 5e6


def test_blocks_touch_few_windows() -> None:
    """Where windows have few samples, what a block costs is their number."""
    order = make_order(make_table([2] * 5000, sample_bytes=100), 200, 8)
    lengths = [indices.numel() for indices, _ in order.iter_blocks()]
    assert max(lengths) <= 64 * 2


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, window=WINDOWS, batch_size=st.integers(1, 20), data=st.data())
def test_chunks_are_named_once_and_at_most_a_window_ahead(
    lengths: list[int], window: int, batch_size: int, data: st.DataObject
) -> None:
    order = make_order(make_table(lengths), window, batch_size)
    arranged = order.windows.arrange_epoch(order.seed, order.epoch)
    whole = batches(order)
    first = data.draw(st.integers(0, len(whole)))
    lookahead = ChunkLookahead(order, first)
    named: list[int] = []
    for number in range(first, len(whole)):
        named += lookahead.advance_batch()
        reached = min((number + 1) * batch_size, order.size)
        current = arranged.window_positions.searchsorted(reached, "right") - 1
        end = arranged.window_positions[min(current + 2, len(arranged.window_positions) - 1)]
        last = arranged.chunk_positions.searchsorted(end, "right")
        assert set(named) <= set(arranged.chunks[:last].tolist())
    at = arranged.chunks.tolist().index(named[0]) if named else 0
    assert named == arranged.chunks[at : at + len(named)].tolist()


def test_a_window_is_named_before_it_begins() -> None:
    """From the first batch on, and from the middle of an epoch."""
    order = make_order(make_table([10] * 40), 100, 5)
    arranged = order.windows.arrange_epoch(order.seed, order.epoch)
    for first in (0, 33):
        lookahead = ChunkLookahead(order, first)
        window = first * 5 // 100
        named = set[int]()
        for number in range(first, 80):
            named.update(lookahead.advance_batch())
            if number >= first + 12:  # the first window is caught up with
                begun = (number * 5 + 5) // 100
                assert named >= set(arranged.chunks[10 * window : 10 * begun + 10].tolist())


def test_parts_of_a_random_split_are_read_chunk_by_chunk() -> None:
    data = Chunked([10] * 40, 30)
    parts = random_split(data, [300, 100], torch.Generator().manual_seed(0))
    parts[1] = Subset(parts[1], range(100)[::-2])  # a part of a part, counted from its end
    for part in parts:
        plan = make_epoch_plan(len(part), 7, 0, data=part)
        order = plan.make_order(1, 0, 1, CPU)
        assert isinstance(order, ChunkedOrder)
        rows = join(batches(order))
        assert sorted(rows) == list(range(len(part)))
        samples = [part[row] for row in rows]
        named = order.windows.chunk_numbers
        assert named is not None
        visits = [
            {sample // 10 for sample in samples[begin:end]}
            for begin, end in itertools.pairwise(
                order.windows.arrange_epoch(0, 1).window_positions.tolist()
            )
        ]
        assert max(map(len, visits)) == 3  # chunks of a window
        assert sum(map(len, visits)) == len(named)  # each chunk in one window
        lookahead = ChunkLookahead(order)
        ahead = join([lookahead.advance_batch() for _ in range(plan.count_batches(1))])
        assert ahead == [chunk for chunk in dict.fromkeys(ahead) if chunk in named]


def test_a_subset_of_other_samples_has_another_layout() -> None:
    data = Chunked([10] * 40, 30)
    layouts = {
        make_epoch_plan(300, 7, 0, data=Subset(data, indices)).layout
        for indices in (range(300), range(1, 301), range(300)[::-1])
    }
    assert len(layouts) == 3
    assert find_chunk_windows(Subset(data, range(20))) is None
    assert find_chunk_windows(Subset(list(range(9)), range(3))) is None  # type: ignore[arg-type]
