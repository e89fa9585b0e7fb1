"""Data without a length: a stream, cut into a number of shards that belongs to the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, Fault

DEFAULT_SHARDS = 8
_MIN_CHOSEN_SHARDS, _MAX_CHOSEN_SHARDS = 4, 16
"""Of a stream that cuts itself."""
_MAX_SHARDS = 4096
"""Every shard is an open stream in some process, and has a state in every snapshot."""
_FORGETFUL_CLASS = "BufferShuffledExamplesIterable"
"""What Hugging Face's `shuffle(buffer_size=…)` adds to a stream: the state of the stream is then
that of what was read, without the samples that wait in the buffer."""

MakeShard = Callable[[int, int], Iterable[Any]]


@dataclass(frozen=True)
class ShardedStream:
    """A stream of samples in shards, as `echelon.data.stream` returns it."""

    make_shard: MakeShard
    """Returns the samples of a shard, from its number and the number of shards."""
    shards: int
    uses_state: bool = True
    """Whether the state of a shard is saved, where it has one; otherwise a resumed run reads again
    what it had read."""


def stream(make_shard: MakeShard, shards: int = DEFAULT_SHARDS) -> ShardedStream:
    """Return data without a length, for train_data or session.batches.

        def read_lines(shard, shards):
            for path in sorted(glob("data/*.jsonl"))[shard::shards]:
                with open(path) as lines:
                    yield from map(json.loads, lines)

        train_data = echelon.data.stream(read_lines, shards=8)

    make_shard  make_shard(shard, shards) returns the samples of one of `shards` shards: a
                generator, an IterableDataset, a list. It is called for every pass over the shard,
                and must not depend on the rank. What it returns may have torchdata's state_dict and
                load_state_dict, to continue at a sample, and set_epoch(number of the pass).
    shards      how many there are. It belongs to the data: other numbers of shards give another
                order. A number that the number of processes divides lets every process read its own
                shards alone.

    Batches take from the shards in turn, so the order of samples is the same at any number of
    processes and after any resume. A shard that ends begins again; trainer.steps says how long a
    training is.
    """
    faults = []
    if not callable(make_shard):
        faults.append(
            Fault(
                f"echelon.data.stream is given {type(make_shard).__name__}",
                "give it a function of (shard, shards) that returns the samples of a shard",
            )
        )
    if type(shards) is not int or not 1 <= shards <= _MAX_SHARDS:
        faults.append(
            Fault(
                f"echelon.data.stream is given shards={shards}",
                f"give a whole number from 1 to {_MAX_SHARDS}",
            )
        )
    if faults:
        raise EchelonError(*faults)
    return ShardedStream(make_shard, shards)


def find_stream(data: Any) -> ShardedStream | None:
    """Return the stream that data is; None for data with samples by index, and for what is no
    data."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, ShardedStream):
        return data
    is_endless = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    if not is_endless or isinstance(data, Mapping | DataLoader) or not hasattr(data, "__iter__"):
        return None
    if _can_cut_itself(data):
        return _cut_hugging_face(data)
    return ShardedStream(_OneShard(data), 1)


class _OneShard:
    """A stream that cannot be cut, as its only shard."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __call__(self, shard: int, shards: int) -> Iterable[Any]:
        return self._data


class _OwnShards:
    """A stream that cuts itself, as Hugging Face's does."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __call__(self, shard: int, shards: int) -> Iterable[Any]:
        cut: Iterable[Any] = self._data.shard(num_shards=shards, index=shard)
        return cut


def _can_cut_itself(data: Any) -> bool:
    """Return whether data has the methods by which a Hugging Face IterableDataset is cut."""
    return callable(getattr(data, "shard", None)) and isinstance(_count_own_shards(data), int)


def _count_own_shards(data: Any) -> Any:
    return getattr(data, "num_shards", None) or getattr(data, "n_shards", None)


def _cut_hugging_face(data: Any) -> ShardedStream:
    if getattr(data, "_distributed", None) is not None:
        raise EchelonError(
            Fault(
                "the stream gives the share of one process (split_dataset_by_node), but every "
                "process takes its share of the whole",
                "give it as it was before split_dataset_by_node",
            )
        )
    is_forgetful = any(
        type(node).__name__ == _FORGETFUL_CLASS
        for node in _iter_pipeline(getattr(data, "_ex_iterable", None))
    )
    shards = _choose_shards(_count_own_shards(data))
    return ShardedStream(_OwnShards(data), shards, uses_state=not is_forgetful)


def _choose_shards(files: int) -> int:
    """Return into how many shards a stream of so many files is cut: of equally many files each,
    where that can be, as a shard with fewer begins again sooner."""
    equal = max(n for n in range(1, _MAX_CHOSEN_SHARDS + 1) if files % n == 0)
    is_bad_cut = equal < _MIN_CHOSEN_SHARDS and files > _MAX_CHOSEN_SHARDS
    return DEFAULT_SHARDS if is_bad_cut else equal


def _iter_pipeline(node: Any) -> Iterator[Any]:
    """Yield the steps of a Hugging Face stream."""
    if node is None:
        return
    yield node
    yield from _iter_pipeline(getattr(node, "ex_iterable", None))
    for part in getattr(node, "ex_iterables", None) or ():
        yield from _iter_pipeline(part)
