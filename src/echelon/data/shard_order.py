"""Which samples a global batch takes from each shard of a stream, and which of them a rank keeps.

Sample number g of the whole training comes from shard g % shards. So batches take from the shards
in turn, all shards are read equally fast whatever the batch size, and how much a shard has given
follows from one number, the samples so far. Within a batch samples are in the order of their
shards: a rank's share, which is contiguous, then overlaps few shards. Where batch size and shards
are multiples of the world size, every shard is read by one rank.

The order is part of what a snapshot promises; `tests/data/test_shard_order.py` pins some of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from echelon.data.sample_order import cut_share


class ShardTake(NamedTuple):
    """What one global batch takes from one shard."""

    total: int
    """Samples of all ranks."""
    start: int
    stop: int
    """Which of them a rank keeps: none where they are equal."""


def count_shard_samples(samples: int, shards: int) -> Any:
    """Return how many samples each shard has given after so many samples of the training: an
    array."""
    return (samples + shards - 1 - np.arange(shards)) // shards


def cut_batch_by_shards(
    samples: int, batch_size: int, shards: int, rank: int, world_size: int
) -> list[ShardTake]:
    """Return what a batch takes from every shard, after so many samples."""
    share = cut_share(batch_size, rank, world_size)
    counts = count_shard_samples(samples + batch_size, shards) - count_shard_samples(
        samples, shards
    )
    ends = np.cumsum(counts)
    starts = np.clip(share.start - (ends - counts), 0, counts)
    stops = np.clip(share.stop - (ends - counts), 0, counts)
    return [
        ShardTake(*numbers)
        for numbers in zip(counts.tolist(), starts.tolist(), stops.tolist(), strict=True)
    ]


def find_readers(samples: int, batch_size: int, shards: int, world_size: int) -> Any:
    """Return which ranks read which shards from a position on: an array of truth values, with a row
    per rank.

    A rank reads a shard from the beginning if any batch gives it a sample of that shard. What
    batches take repeats after a number of them that divides the number of shards.
    """
    readers = np.zeros((world_size, shards), bool)
    shares = [cut_share(batch_size, rank, world_size) for rank in range(world_size)]
    first = np.array([share.start for share in shares])[:, None]
    stop = np.array([share.stop for share in shares])[:, None]
    for _ in range(shards // math.gcd(batch_size, shards)):
        before = count_shard_samples(samples, shards)
        samples += batch_size
        counts = count_shard_samples(samples, shards) - before
        ends = np.cumsum(counts)
        readers |= (counts > 0) & (np.maximum(first, ends - counts) < np.minimum(stop, ends))
    return readers
