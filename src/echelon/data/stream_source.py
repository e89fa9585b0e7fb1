"""The batches of a stream: read in the training process, or ahead of time by loader processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from echelon.data.batches import Batch, BatchOrder, MakeNextOrder
from echelon.data.data_layout import DataLayout
from echelon.data.device_copies import BatchCopier
from echelon.data.loader_errors import iter_fetched
from echelon.data.loader_lifetime import LoaderLifetime
from echelon.data.loader_options import make_loader_error
from echelon.data.sample_digest import compute_sample_digest
from echelon.data.sample_fetcher import end_loader_processes, return_unchanged
from echelon.data.sample_order import cut_share
from echelon.data.sample_seeds import derive_collate_seed, keep_generators, seed_generators
from echelon.data.shard_order import count_shard_samples, cut_batch_by_shards, find_readers
from echelon.data.shard_reader import ShardPosition, ShardReader
from echelon.data.sharded_stream import ShardedStream
from echelon.data.shared_memory_samples import PackedSamples, pack_samples, unpack_samples
from echelon.errors import EchelonError, ExitCode, Fault

ENDLESS = 1 << 62
"""The samples and the batches of a stream: its shards begin again."""
_STATE_BATCHES = 16
"""Loader processes ask shards for their states every that many batches. A resumed run drops the
samples since."""

Positions = Mapping[int, ShardPosition]
"""By shard."""
CheckFirstBatch = Callable[[Positions, Mapping[int, str]], None]
"""Raises where the state of a shard cannot be saved, or where its first sample, given as a digest,
is another one than on other ranks."""


@dataclass(frozen=True)
class StreamPlan:
    """A stream as a plan of epochs: one epoch without an end."""

    batch_size: int
    seed: int
    epoch_samples: int = ENDLESS

    @property
    def layout(self) -> DataLayout:
        """No number of samples: what a stream is made of is compared where it is restored."""
        return DataLayout(0)

    def count_batches(self, epoch: int) -> int:
        """Return the batches of the only epoch."""
        return ENDLESS

    def locate(self, step: int, samples: int) -> tuple[int, int]:
        """Return the only epoch, and the batch after so many steps."""
        return 0, step

    def count_partial_samples(self, samples: int) -> int:
        """Return 0: the next batch may begin after any sample."""
        return 0

    def make_order(
        self, epoch: int, rank: int, world_size: int, device: torch.device
    ) -> StreamOrder:
        """Return a rank's batches."""
        return StreamOrder(self.batch_size, rank, world_size, self.seed, epoch)


@dataclass(frozen=True)
class StreamOrder:
    """One rank's samples of a stream. They have no indices, only their places in batches."""

    batch_size: int
    rank: int
    world_size: int
    seed: int
    epoch: int

    def count_samples(self, batch: int) -> int:
        """Return the samples of a global batch, which are as many in each."""
        return self.batch_size

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield this rank's places in the batches, counted through all of them."""
        share = cut_share(self.batch_size, self.rank, self.world_size)
        for batch in range(first_batch, ENDLESS):
            places = torch.arange(share.start, share.stop) + batch * self.batch_size
            yield places, [len(share)]

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the same: no sample comes twice in the only epoch."""
        return self.iter_blocks(first_batch)


class StreamSource:
    """One rank's shares of the batches of a stream.

    It is at a position of its own and goes on from there. Positions of shards are noted for a
    snapshot only once the loop has counted the batch that they come after: a state is never ahead
    of what was trained with.
    """

    def __init__(
        self,
        stream: ShardedStream,
        name: str,
        plan: StreamPlan,
        rank: int,
        world_size: int,
        workers: int,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any] | None,
        check_first_batch: CheckFirstBatch,
    ) -> None:
        self.stream, self.name = stream, name
        self.storage_device = torch.device("cpu")
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._workers, self._options = workers, options or {}
        self._collate = collate_fn or default_collate
        self._check_first_batch = check_first_batch
        is_pinned = self._options.get("pin_memory", device.type == "cuda")
        self._is_pinned = bool(workers and is_pinned)
        self._copier = BatchCopier(device) if device.type == "cuda" else None
        self._loader: DataLoader[Any] | None = None
        self._samples = 0
        """Those of the batches that were yielded, in all."""
        self._read_positions: deque[tuple[int, Positions]] = deque()
        """What shards said of their positions, after so many samples of the training."""
        self._saved_positions: dict[int, ShardPosition] = {}
        """What they said before the batches that are counted."""
        self._reader: ShareReader | None = None
        self._begin(0, {})

    def _begin(self, samples: int, positions: Positions) -> None:
        """Choose the shards to read from a position on."""
        size, shards = self._plan.batch_size, self.stream.shards
        self.readers = find_readers(samples, size, shards, self._world_size)
        """Which ranks read which shards."""
        self._samples = samples
        self._own_shards = [int(s) for s in np.flatnonzero(self.readers[self._rank])]
        starts = {s: positions.get(s, ShardPosition()) for s in self._own_shards}
        self._saved_positions = starts

    def continue_from(self, samples: int, positions: Sequence[ShardPosition]) -> None:
        """Begin after so many samples of the training, with a saved position of every shard."""
        self._begin(samples, dict(enumerate(positions)))

    def __len__(self) -> int:
        return ENDLESS

    def iter_batches(
        self,
        order: BatchOrder,
        first: int,
        device: torch.device,
        make_next: MakeNextOrder | None = None,
    ) -> Iterator[Batch]:
        """Yield this rank's shares without an end, from where the source is."""
        has_checked = False
        for samples, seed, positions, digests in self._iter_shares():
            self._samples += self._plan.batch_size
            self._read_positions.append((self._samples, positions))
            if not has_checked:
                self._check_first_batch(self._ask_positions(positions), digests)
                has_checked = True
            with keep_generators():
                seed_generators(derive_collate_seed(seed))
                data = self._collate(samples)
            if self._is_pinned:
                data = pin_memory(data)  # type: ignore[no-untyped-call]
            before = self._samples
            moved = data if self._copier is None else self._copier.copy_batch(data)
            yield Batch(moved, len(samples))
            self._note_positions(before)

    def fetch_batch(self, order: BatchOrder, number: int, device: torch.device) -> Batch:
        """Raise: a batch of a stream cannot be read out of turn."""
        raise TypeError(f"{self.name} is a stream: its batches are read once, in order")

    def collect_positions(self, samples: int) -> dict[int, ShardPosition]:
        """Return a position of every shard of which this rank is the first reader, for a snapshot
        after so many samples of the training.

        Where the last batch was left before it was counted, positions are those of before.
        """
        if self._samples == samples:
            self._read_positions.append((samples, self._ask_positions({})))
        self._note_positions(samples)
        first_readers = self.readers.argmax(axis=0)
        return {
            shard: position
            for shard, position in self._saved_positions.items()
            if first_readers[shard] == self._rank
        }

    def close(self) -> None:
        """End the loader processes."""
        if self._loader is not None:
            end_loader_processes(self._loader)

    def _note_positions(self, samples: int) -> None:
        """Take over what shards said of positions that are not after so many samples."""
        while self._read_positions and self._read_positions[0][0] <= samples:
            self._saved_positions.update(self._read_positions.popleft()[1])

    def _ask_positions(self, positions: Positions) -> Positions:
        """Return the positions of the shards; loader processes have sent theirs."""
        if self._reader is None:
            return positions
        with keep_generators():
            return self._reader.get_positions(True)

    def _iter_shares(self) -> Iterator[tuple[list[Any], int, Positions, Mapping[int, str]]]:
        """Yield the samples of this rank's shares, the seed of the first, what is known of the
        positions of its shards, and the digests of their first samples."""
        reading = _Reading(
            self.stream,
            self.name,
            self._plan,
            self._rank,
            self._world_size,
            self._samples,
            {**self._saved_positions},
        )
        workers = min(self._workers, len(self._own_shards))
        if not workers:
            with keep_generators():
                self._reader = ShareReader(reading, self._own_shards)
            while True:
                with keep_generators():
                    samples, seeds = self._reader.read_share()
                yield samples, seeds[0], {}, self._reader.digests
        self._loader = _make_loader(reading, workers, self._options)
        fetched = iter_fetched(self._loader, workers, lambda process: "")
        while True:
            share: list[Any] = []
            first_seed: int | None = None
            positions: dict[int, ShardPosition] = {}
            digests: dict[int, str] = {}
            for _ in range(workers):
                item = next(fetched)
                if isinstance(item, _ReadFaults):
                    raise EchelonError(*item.faults, exit=ExitCode.FAILED)
                share += unpack_samples(item.samples)
                first_seed = item.seed if first_seed is None else first_seed
                positions |= item.positions
                digests |= item.digests
            assert first_seed is not None
            yield share, first_seed, positions, digests


@dataclass(frozen=True)
class _Reading:
    """What a rank reads, and from where on."""

    stream: ShardedStream
    name: str
    plan: StreamPlan
    rank: int
    world_size: int
    samples: int
    positions: Positions


class ShareReader:
    """Reads some of a rank's shards, and keeps the samples of its shares."""

    def __init__(self, reading: _Reading, shards: Sequence[int]) -> None:
        self._reading, self._samples = reading, reading.samples
        given = count_shard_samples(reading.samples, reading.stream.shards)
        self._readers = {}
        for shard in shards:
            reader = ShardReader(reading.stream, shard, reading.plan.seed, reading.name)
            reader.continue_from(reading.positions[shard], int(given[shard]))
            self._readers[shard] = reader
        self.digests: dict[int, str] = {}
        """Of the first sample that was read from each shard."""

    def read_share(self) -> tuple[list[Any], list[int]]:
        """Return the samples of the next batch that the rank keeps, with their seeds."""
        r, samples, seeds = self._reading, [], []
        takes = cut_batch_by_shards(
            self._samples, r.plan.batch_size, r.stream.shards, r.rank, r.world_size
        )
        for shard, reader in self._readers.items():
            take = takes[shard]
            for number in range(take.total):
                sample, seed = reader.take_sample()
                if shard not in self.digests:
                    self.digests[shard] = compute_sample_digest(sample)
                if take.start <= number < take.stop:
                    samples.append(sample)
                    seeds.append(seed)
        self._samples += r.plan.batch_size
        return samples, seeds

    def get_positions(self, with_states: bool) -> dict[int, ShardPosition]:
        """Return the positions of the shards. Without states, only those of shards that have
        none."""
        return {
            shard: reader.get_position(with_states)
            for shard, reader in self._readers.items()
            if with_states or not reader.has_state
        }


# --- loader processes ---


class _ReadShare(NamedTuple):
    """What a loader process sends of a batch."""

    samples: PackedSamples
    seed: int | None
    """Of the first sample; None without one."""
    positions: Positions
    digests: Mapping[int, str]


class _ReadFaults(NamedTuple):
    """What it sends where the stream is at fault: torch would make another error of its text."""

    faults: tuple[Fault, ...]


class _ReaderProcess(IterableDataset[Any]):
    """What runs in a loader process: it reads its part of the rank's shards and sends the samples
    of every batch."""

    def __init__(self, reading: _Reading, workers: int) -> None:
        self._reading, self._workers = reading, workers

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        # A stream that divides itself among torch's loader processes would give each a part of its
        # shard: to the user's code there are none.
        torch_worker._worker_info = None
        shards = list(self._reading.positions)
        part = cut_share(len(shards), info.id, self._workers)
        try:
            reader = ShareReader(self._reading, shards[part.start : part.stop])
            for number in range(ENDLESS):
                samples, seeds = reader.read_share()
                positions = reader.get_positions(number % _STATE_BATCHES == 0)
                first_seed = next(iter(seeds), None)
                yield _ReadShare(pack_samples(samples), first_seed, positions, reader.digests)
        except EchelonError as error:
            while True:
                yield _ReadFaults(error.faults)


def _make_loader(reading: _Reading, workers: int, options: Mapping[str, Any]) -> DataLoader[Any]:
    chosen = {name: value for name, value in options.items() if name != "pin_memory"}
    chosen["worker_init_fn"] = LoaderLifetime(options)
    try:
        return DataLoader(
            _ReaderProcess(reading, workers),
            batch_size=None,
            collate_fn=return_unchanged,
            num_workers=workers,
            # The loader draws a seed for its processes, which would move the generator that the
            # model draws from.
            generator=torch.Generator().manual_seed(0),
            **chosen,
        )
    except (ValueError, TypeError) as error:
        raise make_loader_error(options, error) from error
