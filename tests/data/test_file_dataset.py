"""A FileDataset in batches: read at once, and every sample with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from random_samples import draw_numbers
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate

import echelon
from echelon.data.batches import DatasetSource
from echelon.data.epoch_plan import make_epoch_plan
from echelon.data.file_dataset import FileDataset
from echelon.data.formats import reader
from echelon.data.formats.numpy_files import NumpyReader
from echelon.data.formats.reader import BadSampleError, DataFile, group_by_piece
from echelon.data.sample_fetcher import SampleFetcher
from echelon.data.sample_order import EpochOrder
from echelon.data.sample_shares import SampleShare, iter_shares
from echelon.errors import EchelonError
from echelon.snapshot.state import pack_rng_state

SIZE = 17
BATCH = 5
CPU = torch.device("cpu")


def draw_with_number(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(sample["data"]), *draw_numbers()], dtype=torch.float64)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(10))
    np.save(tmp_path / "b.npy", np.arange(10, SIZE))
    return tmp_path


def read_epoch(
    data: Any, workers: int = 0, world_size: int = 1, collate_fn: Any = None
) -> dict[int, Any]:
    """What was read, by the first number of each sample."""
    found: dict[int, Any] = {}
    for rank in range(world_size):
        source = DatasetSource(data, workers, collate_fn=collate_fn)
        order = EpochOrder(len(data), BATCH, rank, world_size, seed=3, epoch=1)
        for batch in source.iter_batches(order, 0, CPU):
            for first, *others in batch.data.tolist() if batch.sample_count else []:
                found[int(first)] = others
        source.close()
    return found


@pytest.mark.parametrize(("workers", "world_size"), [(0, 2), (0, 3), (1, 1), (2, 3)])
@pytest.mark.slow
def test_a_random_transform_draws_the_same_at_any_number_of_processes(
    numbers: Path, workers: int, world_size: int
) -> None:
    dataset = echelon.data.open(numbers, transform=draw_with_number)
    whole = read_epoch(dataset)
    assert sorted(whole) == list(range(SIZE))
    assert len({draw for draws in whole.values() for draw in draws}) == 3 * SIZE
    assert read_epoch(dataset, workers, world_size) == whole
    assert read_epoch(dataset, workers, world_size, torch.stack) == whole


def test_the_same_within_subsets_and_stacks(numbers: Path) -> None:
    dataset = echelon.data.open(numbers, transform=draw_with_number)
    half = Subset(Subset(dataset, range(SIZE)[::-1]), range(0, SIZE, 2))
    one, three = read_epoch(half), read_epoch(half, world_size=3)
    assert one == three
    assert sorted(one) == list(range(0, SIZE, 2))
    stack: StackDataset[Any] = StackDataset(dataset)

    def unpack(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample for (sample,) in samples])

    whole = read_epoch(dataset)
    assert read_epoch(stack, collate_fn=unpack) == whole
    assert read_epoch(stack, world_size=2, collate_fn=unpack) == whole


def test_reading_leaves_the_random_numbers_of_the_training_alone(numbers: Path) -> None:
    before = pack_rng_state()
    read_epoch(echelon.data.open(numbers, transform=draw_with_number))
    assert torch.equal(pack_rng_state(), before)


class CountingReader:
    """The rows of a FileDataset, and how often they were asked for."""

    def __init__(self, dataset: FileDataset) -> None:
        self.reader = dataset.reader
        self.chunks, self.column_names = self.reader.chunks, self.reader.column_names
        self.locate = self.reader.locate
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.reader)

    def read_samples(self, rows: Any) -> list[dict[str, Any]]:
        self.calls.append(list(rows))
        return self.reader.read_samples(rows)


def test_a_share_is_read_at_once(numbers: Path) -> None:
    reader = CountingReader(echelon.data.open(numbers))
    dataset = FileDataset(reader)
    share = SampleShare([3, SIZE + 12, 0], seed=0, epoch=0)
    batch = SampleFetcher(dataset, None).fetch(share).data
    assert batch["data"].tolist() == [3, 12, 0]
    assert reader.calls == [[3, 12, 0]]
    assert [int(each["data"]) for each in dataset.__getitems__([-1, 2])] == [16, 2]


def test_a_batch_of_columns_is_what_default_collate_makes(numbers: Path) -> None:
    dataset = echelon.data.open(numbers)
    fetched = SampleFetcher(dataset, None).fetch(SampleShare([3, 12], seed=0, epoch=0))
    collated = SampleFetcher(dataset, default_collate).fetch(SampleShare([3, 12], 0, 0))
    apart = SampleFetcher(dataset, lambda samples: default_collate(samples)).fetch(
        SampleShare([3, 12], seed=0, epoch=0)
    )
    for batch in (fetched.data, collated.data, apart.data):
        assert list(batch) == ["data"]
        assert torch.equal(batch["data"], torch.tensor([3, 12]))


def test_it_is_a_list_and_a_dataset_of_torch(numbers: Path) -> None:
    dataset = echelon.data.open(numbers)
    assert [int(each["data"]) for each in dataset] == list(range(SIZE))
    with pytest.raises(IndexError, match="there is no sample 17: the files have 17"):
        dataset[SIZE]
    loader = DataLoader(dataset, batch_size=6, num_workers=1)
    assert torch.cat([batch["data"] for batch in loader]).tolist() == list(range(SIZE))


@pytest.mark.parametrize("batch_size", [3, 16])
def test_batches_that_are_read_together_are_those_read_alone(
    tmp_path: Path, batch_size: int
) -> None:
    """Texts and numbers of several row groups; tensors at aligned addresses."""
    columns = {
        "text": [f"row {number}" for number in range(1000)],
        **{name: np.arange(1000, dtype=name) for name in ("float32", "int64", "int16")},
        "other": np.arange(1000, dtype=np.int64) * 2,
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=150)
    dataset = echelon.data.open(tmp_path)
    order = EpochOrder(1000, batch_size, 0, 1, seed=3, epoch=1)
    together = list(DatasetSource(dataset, 0).iter_batches(order, 0, CPU))
    fetcher = SampleFetcher(dataset, None)
    alone = [fetcher.fetch(share).data for share in iter_shares(order, 0)]
    assert [batch.sample_count for batch in together] == [len(each["text"]) for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert list(one.data) == list(other)
        assert one.data["text"] == other["text"]
        for name in ("float32", "int64", "int16", "other"):
            assert torch.equal(one.data[name], other[name])
            assert one.data[name].dtype == other[name].dtype
    assert all(batch.data["int16"].data_ptr() % 64 == 0 for batch in together[9:])


def test_a_sample_that_fails_ends_its_own_batch_and_none_before(numbers: Path) -> None:
    dataset = echelon.data.open(numbers)
    reader: Any = dataset.reader
    read, order = reader.read_columns, EpochOrder(SIZE, 1, 0, 1, seed=3, epoch=1)
    expected = [share.draws[0] for share in iter_shares(order, 0)]

    def fail(rows: Any) -> Any:
        if expected[11] in rows:
            raise BadSampleError(reader.locate(expected[11]), "torn")
        return read(rows)

    reader.read_columns = fail
    batches = DatasetSource(dataset, 0).iter_batches(order, 0, CPU)
    drawn = [int(next(batches).data["data"]) for _ in range(11)]
    with pytest.raises(EchelonError, match="torn"):
        next(batches)
    assert drawn == expected[:11]


@pytest.mark.parametrize("pieces", [1, 7, 70_000])
def test_rows_are_grouped_by_piece(pieces: int) -> None:
    starts = np.arange(0, 3 * pieces + 1, 3)
    rows = np.random.default_rng(0).integers(0, 3 * pieces, 500)
    found = np.full(len(rows), -1)
    seen = []
    for piece, places, within in group_by_piece(starts, rows):
        found[places] = 3 * piece + within
        seen.append(piece)
    assert np.array_equal(found, rows)
    assert len(seen) == len(set(seen))


class NotingReader(NumpyReader):
    """Notes which chunks it was told of, and which samples it has read before."""

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        self.named = [*getattr(self, "named", []), *chunks]

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        read = set(np.searchsorted(self.chunks.starts, rows, "right") - 1)
        self.late = getattr(self, "late", 0) + len(read - set(self.named))
        return super().read_columns(rows)


@pytest.mark.parametrize("part", [range(600), range(0, 600, 7), range(600)[::-1]])
def test_the_reader_is_told_of_chunks_before_they_are_read(
    tmp_path: Path, part: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", 80)  # ten numbers
    np.save(tmp_path / "a.npy", np.arange(600))
    noting = NotingReader([DataFile(tmp_path / "a.npy", tmp_path)], None)
    files = FileDataset(noting)
    files.window_bytes = 800
    data = Subset(files, part)
    plan = make_epoch_plan(len(data), 2, 0, data=data)
    order = plan.make_order(0, 0, 1, CPU)
    source = DatasetSource(data, 0)
    found = [int(n) for b in source.iter_batches(order, 0, CPU) for n in b.data["data"]]
    assert sorted(found) == sorted(part)
    assert sorted(noting.named) == list(range(60))
    assert noting.late <= 30  # those of the first batches
