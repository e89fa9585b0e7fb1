"""What a rank takes of every global batch, with the parts of files that will be needed soon."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from echelon.data.chunk_order import ChunkedOrder, ChunkLookahead
from echelon.data.remote_chunks import RemoteChunks

if TYPE_CHECKING:
    from echelon.data.batches import BatchOrder

_MAX_SHARES_AHEAD = 16
_NEW_SHARES = 3
"""So many more are looked at with each share but the first, which waits for no other's chunks."""
_MAX_NAMED = 1 << 16
"""Chunks that are remembered, not to be named again."""


class SampleShare(NamedTuple):
    """The samples that a rank takes of one global batch, as a loader process is asked for them."""

    draws: Sequence[int]
    """Their indices in the Dataset, plus a multiple of its length for one that comes again in the
    epoch."""
    seed: int
    epoch: int
    chunks_ahead: Sequence[int] = ()
    """Chunks of the files that will be needed soon, and that no earlier share has named."""


def iter_shares(
    order: BatchOrder, first_batch: int, remote: RemoteChunks | None = None
) -> Iterator[SampleShare]:
    """Yields the shares of a rank, batch by batch; some may be empty.

    An order in windows names its chunks. Of any other, such as that of a mixture or of data that
    fits one window, the chunks of objects are named that the next shares need.
    """
    if isinstance(order, ChunkedOrder):
        ahead = ChunkLookahead(order, first_batch)
        for share in _cut_shares(order, first_batch):
            yield share._replace(chunks_ahead=ahead.advance_batch())
    elif remote:
        yield from _name_chunks(_cut_shares(order, first_batch), remote)
    else:
        yield from _cut_shares(order, first_batch)


def _cut_shares(order: BatchOrder, first_batch: int) -> Iterator[SampleShare]:
    for draws, counts in order.iter_draws(first_batch):
        # An array is cut and sent in a tenth of the time of a list.
        numbers = array("q", draws.to("cpu", torch.int64).numpy().tobytes())
        for stop, count in zip(accumulate(counts), counts, strict=True):
            yield SampleShare(numbers[stop - count : stop], order.seed, order.epoch)


def _name_chunks(shares: Iterator[SampleShare], remote: RemoteChunks) -> Iterator[SampleShare]:
    """Yields shares with the chunks that they or the next ones need, each named once."""
    upcoming: deque[SampleShare] = deque()
    samples_ahead, max_samples = 0, remote.max_samples_ahead
    named: set[int] = set()
    new_shares = 1
    if not remote.is_mixture:  # all that the first share needs is fetched at once as it is read
        yield from islice(shares, 1)
        new_shares = _NEW_SHARES
    while True:
        chunks: dict[int, None] = {}
        for _ in range(new_shares):
            is_far = len(upcoming) > _MAX_SHARES_AHEAD or samples_ahead > max_samples
            if (upcoming and is_far) or (share := next(shares, None)) is None:
                break
            upcoming.append(share)
            samples_ahead += len(share.draws)
            chunks |= dict.fromkeys(remote.find_chunks(share.draws))
        if not upcoming:
            return
        new_shares = _NEW_SHARES
        if len(named) > _MAX_NAMED:
            named.clear()
        fresh = [chunk for chunk in chunks if chunk not in named]
        named.update(fresh)
        share = upcoming.popleft()
        samples_ahead -= len(share.draws)
        yield share._replace(chunks_ahead=fresh)
