"""Streams read by ranks and loader processes: the same samples at any number of both, and after any
resume."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from numbered_streams import StatefulShard, numbered_stream
from torch.utils.data import IterableDataset, get_worker_info

import echelon
from echelon.data.shard_reader import ShardPosition
from echelon.data.sharded_stream import ShardedStream, find_stream
from echelon.data.stream_source import Positions, StreamPlan, StreamSource
from echelon.errors import EchelonError

CPU = torch.device("cpu")
KINDS = ["plain", "stateful", "iterator"]


def check_nothing(positions: Positions, digests: Mapping[int, str]) -> None:
    """In the place of the check by the training."""


def open_source(
    stream: Any,
    batch_size: int = 5,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    **options: Any,
) -> StreamSource:
    found = find_stream(stream)
    assert found is not None
    plan = StreamPlan(batch_size, seed=3)
    collate_fn = options.pop("collate_fn", None)
    return StreamSource(
        found,
        "train_data",
        plan,
        rank,
        world_size,
        workers,
        CPU,
        collate_fn,
        options,
        check_nothing,
    )


def read_batches(source: StreamSource, count: int) -> list[Any]:
    """The rows of this rank's next batches, as lists."""
    order = StreamPlan(5, 3).make_order(0, 0, 1, CPU)
    batches = source.iter_batches(order, 0, CPU)
    return [batch.data.tolist() for batch in islice(batches, count)]


def read_world(
    stream: ShardedStream,
    world_size: int,
    count: int,
    batch_size: int = 5,
    start: tuple[int, Sequence[ShardPosition]] | None = None,
    workers: int = 0,
) -> tuple[list[Any], tuple[int, list[ShardPosition]]]:
    """The global batches, and the position after them as a snapshot would have it."""
    samples = (start[0] if start else 0) + count * batch_size
    of_ranks: list[list[Any]] = []
    positions: dict[int, ShardPosition] = {}
    for rank in range(world_size):
        source = open_source(stream, batch_size, rank, world_size, workers)
        if start is not None:
            source.continue_from(*start)
        try:
            of_ranks.append(read_batches(source, count))
            own = source.collect_positions(samples)
        finally:
            source.close()
        assert not positions.keys() & own.keys(), "one rank tells of a shard"
        positions |= own
    batches = [list(chain(*shares)) for shares in zip(*of_ranks, strict=True)]
    return batches, (samples, [positions[shard] for shard in range(stream.shards)])


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch_size", [5, 8])
@pytest.mark.slow
def test_batches_are_the_same_at_any_world_size(shards: int, batch_size: int) -> None:
    whole, _ = read_world(numbered_stream("plain", shards), 1, 9, batch_size)
    rows = [tuple(row[:3]) for batch in whole for row in batch]
    of_shards = [[row for row in rows if row[0] == shard] for shard in range(shards)]
    for shard, own in enumerate(of_shards):
        length = 7 + shard
        assert own == [(shard, n // length, n % length) for n in range(len(own))], "no sample lost"
    for world_size in range(2, 6):
        other, _ = read_world(numbered_stream("plain", shards), world_size, 9, batch_size)
        assert other == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worlds", [(1, 1), (1, 3), (2, 3), (4, 1), (3, 2)])
@pytest.mark.slow
def test_a_resume_goes_on_at_any_world_size(kind: str, worlds: tuple[int, int]) -> None:
    stream = numbered_stream(kind, 4)
    whole, _ = read_world(stream, 1, 20)
    for count in (1, 7):  # in the first pass and in later ones
        first, position = read_world(stream, worlds[0], count)
        rest, end = read_world(stream, worlds[1], 20 - count, start=position)
        assert first + rest == whole
        assert end[1] == read_world(stream, 1, 20)[1][1]


def test_a_resume_may_change_the_batch_size() -> None:
    stream = numbered_stream("stateful", 4)
    first, position = read_world(stream, 2, 3, batch_size=5)
    rest, _ = read_world(stream, 3, 4, batch_size=7, start=position)
    rows = sorted(tuple(row[:3]) for batch in first + rest for row in batch)
    taken = [11, 11, 11, 10]
    assert rows == sorted(
        (shard, n // (7 + shard), n % (7 + shard))
        for shard in range(4)
        for n in range(taken[shard])
    )


def test_a_state_spares_reading_again() -> None:
    made: list[StatefulShard] = []

    def make_shard(shard: int, shards: int) -> StatefulShard:
        made.append(StatefulShard(shard, 100))
        return made[-1]

    stream = echelon.data.stream(make_shard, 2)
    _, position = read_world(stream, 1, 10)
    assert [p.state["iterable"]["number"] for p in position[1]] == [25, 25]
    made.clear()
    read_world(stream, 1, 2, start=position)
    assert [shard.reads for shard in made] == [list(range(25, 30))] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_loader_processes_change_nothing(kind: str) -> None:
    """Their states are up to 16 batches old, and the samples since are dropped."""
    stream = numbered_stream(kind, 4)
    whole, _ = read_world(stream, 1, 30)
    for workers, world_size in ((2, 1), (1, 2)):
        first, position = read_world(stream, world_size, 19, workers=workers)
        rest, _ = read_world(stream, 1, 11, start=position, workers=workers)
        assert first + rest == whole
        states = [p.state is not None for p in position[1]]
        assert states == [kind != "plain"] * 4


def test_a_batch_that_was_not_counted_is_read_again() -> None:
    """A loop may be left before its step: then the snapshot is of the step before."""
    stream = numbered_stream("stateful", 2)
    whole, _ = read_world(stream, 1, 8)
    for workers in (0, 1):
        source = open_source(stream, workers=workers)
        assert read_batches(source, 5) == whole[:5]
        positions = source.collect_positions(20)
        source.close()
        assert max(p.samples for p in positions.values()) <= 10
        rest, _ = read_world(stream, 1, 4, start=(20, [positions[0], positions[1]]))
        assert rest == whole[4:8]


def read_generators() -> Any:
    numpy_state: Any = np.random.get_state(legacy=True)
    return random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()


def test_the_numbers_of_the_training_process_are_its_own() -> None:
    source = open_source(numbered_stream("stateful", 2))
    state = read_generators()
    read_batches(source, 3)
    source.collect_positions(15)
    assert read_generators() == state


def test_a_collate_fn_makes_the_batches() -> None:
    def collect(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)[:, :3] + random.random()

    once = read_batches(open_source(numbered_stream("plain", 3), collate_fn=collect), 3)
    again = read_batches(open_source(numbered_stream("plain", 3), workers=2, collate_fn=collect), 3)
    assert once == again


class DividedAmongWorkers(IterableDataset[Any]):
    """As many public streams are written: a loader process reads its part alone."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 20, 1 if info is None else 2))


def test_streams_that_look_for_loader_processes_find_none() -> None:
    stream = echelon.data.stream(lambda shard, shards: DividedAmongWorkers(), 2)
    source = open_source(stream, batch_size=4, workers=2)
    try:
        assert read_batches(source, 2) == [[0, 1, 0, 1], [2, 3, 2, 3]]
    finally:
        source.close()


def test_samples_of_any_type_come_from_loader_processes() -> None:
    def make_shard(shard: int, shards: int) -> Iterator[Any]:
        for number in range(10):
            row = torch.full((3,), float(number), dtype=torch.bfloat16)
            yield {
                "row": row,
                "array": np.arange(number)[::2],
                "text": f"{shard}/{number}",
                "empty": torch.empty(0, 2),
                "flag": torch.tensor(True),
                "complex": torch.tensor([1j]).conj(),
            }

    stream = echelon.data.stream(make_shard, 2)
    kept: list[Any] = []

    def keep(samples: list[Any]) -> torch.Tensor:
        kept.append(samples)
        return torch.zeros(1)

    for workers in (0, 2):
        source = open_source(stream, batch_size=6, workers=workers, collate_fn=keep)
        read_batches(source, 2)
        source.close()
    alone, from_processes = kept[:2], kept[2:]
    for one, other in zip(chain(*alone), chain(*from_processes), strict=True):
        assert one.keys() == other.keys()
        for name in ("row", "empty", "flag", "complex"):
            assert torch.equal(one[name], other[name])
            assert one[name].dtype == other[name].dtype
        assert np.array_equal(one["array"], other["array"])
        assert one["text"] == other["text"]


# --- what can go wrong ---


def test_an_empty_shard_is_named() -> None:
    stream = echelon.data.stream(lambda shard, shards: [1.0] * (shard != 1), 2)
    for workers in (0, 2):
        source = open_source(stream, workers=workers)
        with pytest.raises(EchelonError, match="shard 1 of 2 of train_data gives no samples"):
            read_batches(source, 1)
        source.close()


def test_a_generator_is_read_once() -> None:
    source = open_source(iter(range(7)))
    with pytest.raises(EchelonError, match=r"ended after 7 samples, and a .*iterator can be read"):
        read_batches(source, 2)


def test_a_shard_that_raises_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def make_shard(shard: int, shards: int) -> Iterator[int]:
        yield from range(3)
        raise ValueError("a broken line")

    source = open_source(echelon.data.stream(make_shard, 2))
    with pytest.raises(ValueError, match="a broken line") as caught:
        read_batches(source, 2)
    notes = getattr(caught.value, "__notes__", [])  # before Python 3.11 it is printed
    said = [*notes, *capsys.readouterr().err.splitlines()]
    assert said == ["in shard 0 of 2 of train_data: it failed at sample 3 of pass 1"]


@pytest.mark.parametrize("shards", [0, 5000, "4", True])
def test_a_number_of_shards_that_is_none(shards: Any) -> None:
    with pytest.raises(EchelonError, match="give a whole number from 1 to 4096"):
        echelon.data.stream(range, shards)


def test_what_is_a_stream() -> None:
    class Sized(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    data: Any
    for data in ([1, 2], {"a": 1}, torch.zeros(3), "text", None, 5):
        assert find_stream(data) is None
    for data in (Sized(), iter([1]), (n for n in range(3))):
        found = find_stream(data)
        assert found is not None
        assert found.shards == 1


class CutsItself:
    """As a Hugging Face IterableDataset."""

    num_shards = 20
    _distributed: Any = None
    _ex_iterable: Any = None

    def shard(self, num_shards: int, index: int) -> list[int]:
        return [100 * num_shards + index]

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is read by shards")


class BufferShuffledExamplesIterable:
    ex_iterable = None


class OnTop:
    ex_iterables = (None, BufferShuffledExamplesIterable())


def test_a_stream_that_cuts_itself() -> None:
    found = find_stream(CutsItself())
    assert found is not None
    assert (found.shards, found.uses_state) == (10, True)
    for files, shards in ((1, 1), (3, 3), (12, 12), (13, 13), (17, 8), (1024, 16)):
        several = CutsItself()
        several.num_shards = files
        cut = find_stream(several)
        assert cut is not None
        assert cut.shards == shards
    assert found.make_shard(3, 8) == [803]
    shuffled = CutsItself()
    shuffled._ex_iterable = OnTop()
    found = find_stream(shuffled)
    assert found is not None
    assert not found.uses_state, "its state has lost the samples in the buffer"
    share = CutsItself()
    share._distributed = object()
    with pytest.raises(EchelonError, match="split_dataset_by_node"):
        find_stream(share)
