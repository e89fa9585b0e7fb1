"""What batches take from the shards of a stream: fair, and the same at any world size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.shard_order import (
    ShardTake,
    count_shard_samples,
    cut_batch_by_shards,
    find_readers,
)

SIZES = st.integers(1, 40)
SHARDS = st.integers(1, 12)
WORLDS = st.integers(1, 5)
POSITIONS = st.integers(0, 1000)


@given(POSITIONS, SIZES, SHARDS, WORLDS)
def test_every_sample_of_a_batch_is_kept_once(
    samples: int, batch_size: int, shards: int, world_size: int
) -> None:
    of_ranks = [
        cut_batch_by_shards(samples, batch_size, shards, rank, world_size)
        for rank in range(world_size)
    ]
    kept = [
        (shard, number)
        for takes in of_ranks
        for shard, take in enumerate(takes)
        for number in range(take.start, take.stop)
    ]
    totals = [take.total for take in of_ranks[0]]
    assert kept == [(shard, n) for shard in range(shards) for n in range(totals[shard])]
    assert len(kept) == batch_size
    assert all([take.total for take in takes] == totals for takes in of_ranks)


@given(POSITIONS, st.lists(SIZES, max_size=20), SHARDS)
def test_shards_are_read_equally_fast(samples: int, batch_sizes: list[int], shards: int) -> None:
    """Also where the batch size changes at a resume."""
    given = count_shard_samples(samples, shards)
    assert given.sum() == samples
    for size in batch_sizes:
        given += [take.total for take in cut_batch_by_shards(samples, size, shards, 0, 1)]
        samples += size
        assert np.array_equal(given, count_shard_samples(samples, shards))
        assert given.max() - given.min() <= 1


@given(POSITIONS, SIZES, SHARDS, WORLDS)
def test_readers_are_those_that_keep_a_sample(
    samples: int, batch_size: int, shards: int, world_size: int
) -> None:
    readers = find_readers(samples, batch_size, shards, world_size)
    seen = np.zeros_like(readers)
    for batch in range(2 * shards):
        for rank in range(world_size):
            takes = cut_batch_by_shards(
                samples + batch * batch_size, batch_size, shards, rank, world_size
            )
            seen[rank] |= [take.start < take.stop for take in takes]
    assert np.array_equal(readers, seen)
    assert readers.any(axis=0).all()
    if batch_size % shards == 0 and shards % world_size == 0:
        assert (readers.sum(axis=0) == 1).all()


def test_pinned_takes() -> None:
    """A snapshot continues in this order."""
    takes = [cut_batch_by_shards(samples, 5, 3, 1, 2) for samples in (0, 5, 10)]
    assert takes == [
        [ShardTake(2, 2, 2), ShardTake(2, 1, 2), ShardTake(1, 0, 1)],
        [ShardTake(2, 2, 2), ShardTake(1, 1, 1), ShardTake(2, 0, 2)],
        [ShardTake(1, 1, 1), ShardTake(2, 2, 2), ShardTake(2, 0, 2)],
    ]
