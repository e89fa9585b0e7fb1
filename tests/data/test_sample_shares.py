"""Chunks of objects are named before their samples are read, where the order knows no chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from echelon.data.epoch_plan import make_epoch_plan
from echelon.data.file_dataset import FileDataset
from echelon.data.formats.reader import ChunkTable, SamplePlace
from echelon.data.mixture import mix
from echelon.data.remote_chunks import RemoteChunks
from echelon.data.sample_shares import iter_shares


class NumberReader:
    """Numbers in chunks of ten, and the chunks that were asked for ahead. Implements SampleReader
    and PrefetchingReader."""

    def __init__(self, chunks: int) -> None:
        self.chunks = ChunkTable(np.arange(0, 10 * chunks + 1, 10), np.full(chunks, 1000))
        self.column_names = ["number"]
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return int(self.chunks.starts[-1])

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{"number": row} for row in rows]

    def locate(self, row: int) -> SamplePlace:
        raise NotImplementedError

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        self.fetched += chunks


class Numbers(FileDataset):
    def __init__(self, chunks: int, *, is_remote: bool = True) -> None:
        self.numbers = NumberReader(chunks)
        super().__init__(self.numbers, is_remote=is_remote)

    @property
    def fetched(self) -> list[int]:
        return sorted(self.numbers.fetched)


def read_epoch(data: Any, epoch: int = 0, batch_size: int = 4) -> None:
    """Require that every chunk is named once, and before a sample of it is read."""
    order = make_epoch_plan(len(data), batch_size, 0, data=data).make_order(
        epoch, 0, 1, torch.device("cpu")
    )
    plain = [list(share.draws) for share in iter_shares(order, 0)]
    remote = RemoteChunks(data)
    named: list[int] = []
    seen: list[list[int]] = []
    for share in iter_shares(order, 0, remote):
        named += share.chunks_ahead
        is_first = not seen and not remote.is_mixture
        assert is_first or set(remote.find_chunks(share.draws)) <= set(named)
        remote.prefetch_chunks(share.chunks_ahead)
        seen.append(list(share.draws))
    assert seen == plain
    assert len(named) == len(set(named))


def test_data_that_fits_one_window_is_named_in_the_order_of_its_samples() -> None:
    data = Numbers(40)
    read_epoch(data)
    assert data.fetched == list(range(40))
    shares = iter_shares(_make_order(data), 0, RemoteChunks(data))
    assert not next(shares).chunks_ahead  # it comes soon, as nothing else is fetched
    assert 4 < len(next(shares).chunks_ahead) <= 12


def _make_order(data: Any) -> Any:
    return make_epoch_plan(len(data), 4, 0, data=data).make_order(0, 0, 1, torch.device("cpu"))


def test_of_a_subset_its_own_chunks_are_named() -> None:
    data = Numbers(40)
    read_epoch(Subset(Subset(data, range(50, 90)), [-1, 0, 25, -2, 1, 26]), batch_size=1)
    assert data.fetched == [5, 7, 8]


def test_every_source_of_a_mixture_is_told_of_its_own_chunks() -> None:
    tensors = [torch.tensor(number) for number in range(30)]
    web, code, local = Numbers(6), Numbers(9), Numbers(3, is_remote=False)
    part = Subset(code, range(45, 90))
    data = mix({"tensors": tensors, "web": web, "code": part, "local": local})
    read_epoch(data, batch_size=7)
    assert web.fetched == list(range(6))
    assert code.fetched == [4, 5, 6, 7, 8]
    assert local.fetched == []


def test_nothing_is_named_of_local_files() -> None:
    data = Numbers(40, is_remote=False)
    assert not RemoteChunks(data)
    shares = list(iter_shares(_make_order(data), 0, RemoteChunks(data)))
    assert not any(share.chunks_ahead for share in shares)
