"""Streams whose samples say which they are and what they drew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import echelon
from echelon.data.sharded_stream import ShardedStream


class NumberedShard(IterableDataset[Any]):
    """Samples (shard, pass, number, noise). With torchdata's protocol it continues at a state."""

    def __init__(self, shard: int, length: int) -> None:
        self.shard, self.length = shard, length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def make_sample(self, number: int) -> torch.Tensor:
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.tensor([self.shard, self.epoch, number, noise], dtype=torch.float64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.make_sample, range(self.length))


class StatefulShard(NumberedShard):
    """It counts what was read from it, to show that a resume reads nothing twice."""

    def __init__(self, shard: int, length: int) -> None:
        super().__init__(shard, length)
        self.number = 0
        self.reads: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "table": torch.tensor([self.number])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["table"]) == state["number"]
        self.number = state["number"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.number < self.length:
            self.number += 1
            self.reads.append(self.number - 1)
            yield self.make_sample(self.number - 1)
        self.number = 0


class StatefulIterator:
    """An iterable whose iterator has the state."""

    def __init__(self, shard: int, length: int) -> None:
        self._shard = StatefulShard(shard, length)

    def set_epoch(self, epoch: int) -> None:
        self._shard.epoch = epoch

    def __iter__(self) -> _CountingIterator:
        return _CountingIterator(self._shard)


class _CountingIterator:
    def __init__(self, shard: StatefulShard) -> None:
        self._shard, self._number = shard, 0

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> torch.Tensor:
        if self._number == self._shard.length:
            raise StopIteration
        self._number += 1
        return self._shard.make_sample(self._number - 1)

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number = state["number"]


KINDS = {"plain": NumberedShard, "stateful": StatefulShard, "iterator": StatefulIterator}


def numbered_stream(kind: str, shards: int, length: int = 7) -> ShardedStream:
    """Shards of unequal lengths: `length`, and one more each."""

    def make_shard(shard: int, count: int) -> Any:
        assert count == shards
        return KINDS[kind](shard, length + shard)

    return echelon.data.stream(make_shard, shards)
