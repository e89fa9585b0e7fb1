"""Samples that cannot be read: named by file and number, or replaced by the next readable one, in
the training process and in loader processes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from random_samples import draw_numbers
from torch.utils.data import Dataset, Subset

from echelon.data.bad_samples import BadSample, BadSampleList
from echelon.data.batches import DatasetSource
from echelon.data.formats.reader import BadSampleError, SamplePlace
from echelon.data.sample_order import EpochOrder
from echelon.errors import EchelonError, ExitCode, Fault

CPU = torch.device("cpu")
SIZE = 17


class Damaged(Dataset[Any]):
    """Some samples cannot be read; the others are their numbers and random numbers."""

    def __init__(self, *bad: int, error: str = "") -> None:
        self.bad, self.error = bad, error

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            if self.error == "fault":
                raise EchelonError(Fault("no library", "install it"))
            if self.error:
                raise ValueError(self.error)
            raise BadSampleError(SamplePlace(Path("a.tar"), index, f"n{index}"), "not a picture")
        return torch.tensor([index, *draw_numbers()], dtype=torch.float64)


class Located(Damaged):
    def locate(self, row: int) -> SamplePlace:
        return SamplePlace(Path("b.bin"), row)


class Grouped(Damaged):
    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return [self[row] for row in rows]


def fetch(
    data: Dataset[Any],
    listed: BadSampleList | None,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    first: int = 0,
) -> list[torch.Tensor]:
    source = DatasetSource(data, workers, name="train_data", bad_samples=listed)
    order = EpochOrder(SIZE, 5, rank, world_size, 0, 1)
    try:
        return [
            batch.data for batch in source.iter_batches(order, first, CPU) if batch.data is not None
        ]
    finally:
        source.close()


def read_listed(file: Path) -> list[tuple[int, str, int]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["data"] == "train_data" and line["why"] for line in lines)
    return sorted((line["row"], line["place"], line["instead"]) for line in lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bad_samples.jsonl"


def list_order(replaced: dict[int, int]) -> list[int]:
    [(indices, _), *more] = EpochOrder(SIZE, SIZE, 0, 1, 0, 1).iter_blocks()
    assert not more
    return [replaced.get(index, index) for index in indices.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Damaged, Grouped])
@pytest.mark.slow
def test_a_bad_sample_is_replaced_by_the_next_readable_one(
    kind: type[Damaged], workers: int, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the last one, and two in a row; other samples draw the random numbers they always do."""
    listed = BadSampleList(file, 5)
    rows = torch.cat(fetch(kind(4, 5, 16), listed, workers))
    assert rows[:, 0].tolist() == list_order({4: 6, 5: 6, 16: 0})
    whole = torch.cat(fetch(kind(), None))
    assert torch.equal(rows[:, 1:], whole[:, 1:])
    expected = [(n, f"a.tar, sample {n} (n{n})", to) for n, to in ((4, 6), (5, 6), (16, 0))]
    assert read_listed(file) == expected
    fetch(kind(4, 5, 16), listed, workers)
    fetch(kind(4, 5, 16), BadSampleList(file, 5), workers)
    assert read_listed(file) == expected
    warned = [line for line in capfd.readouterr().err.splitlines() if "warning: skipped" in line]
    assert len(warned) == 3
    assert (
        "of train_data: a.tar, sample 5 (n5): not a picture; sample 6 takes its place"
        in "".join(warned)
    )


def test_the_order_is_the_same_at_any_world_size_and_after_a_resume(file: Path) -> None:
    data = Located(4, 5, 16, error="no such pixel")
    whole = fetch(data, BadSampleList(file, 5))
    for world_size in (2, 3):
        ranks = [
            torch.cat(fetch(data, BadSampleList(file, 5), rank % 2, rank, world_size))
            for rank in range(world_size)
        ]
        assert sorted(torch.cat(ranks).tolist()) == sorted(torch.cat(whole).tolist())
    assert torch.equal(
        torch.cat(fetch(data, BadSampleList(file, 5), first=2)), torch.cat(whole[2:])
    )
    assert [place for _, place, _ in read_listed(file)] == [
        f"b.bin, sample {n}" for n in (4, 5, 16)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_named(workers: int) -> None:
    for data, place in (
        (Damaged(4), "a.tar, sample 4 (n4): not a picture"),
        (Grouped(4), "a.tar, sample 4 (n4): not a picture"),
        (Located(4, error="no such pixel"), "b.bin, sample 4: ValueError: no such pixel (/"),
        (Subset(Damaged(4), range(SIZE)), "a.tar, sample 4 (n4): not a picture"),
    ):
        with pytest.raises(EchelonError) as caught:
            fetch(data, None, workers)
        [fault] = caught.value.faults
        assert f"train_data has a sample that cannot be read: {place}" in fault.what
        assert "trainer.bad_samples=skip" in fault.do
        assert caught.value.exit == ExitCode.FAILED


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_another_dataset_keeps_its_traceback_and_a_fault_its_sentence(
    workers: int, file: Path
) -> None:
    with pytest.raises(ValueError, match="no such pixel"):
        fetch(Damaged(4, error="no such pixel"), None, workers)
    for listed in (None, BadSampleList(file, 5)):
        with pytest.raises(EchelonError) as caught:
            fetch(Damaged(4, error="fault"), listed, workers)
        assert caught.value.faults == (Fault("no library", "install it"),)


@pytest.mark.parametrize(("bad", "kind"), [((2, 4, 8), Damaged), (tuple(range(SIZE)), Grouped)])
def test_too_many_bad_samples_end_it(bad: tuple[int, ...], kind: type[Damaged], file: Path) -> None:
    with pytest.raises(EchelonError, match=r"trainer\.max_bad_samples=2, but more") as caught:
        fetch(kind(*bad), BadSampleList(file, 2))
    assert caught.value.exit == ExitCode.FAILED


def test_all_samples_bad_and_many_allowed_ends_too(file: Path) -> None:
    with pytest.raises(EchelonError, match="but more samples of train_data cannot be read"):
        fetch(Damaged(*range(SIZE)), BadSampleList(file, 1000))


def add_to_list(file: Path, rows: range) -> None:
    listed = BadSampleList(file, 1000)
    for row in rows:
        listed.add("train_data", [BadSample(row, f"sample {row}", "gone", row + 1)])


def test_processes_list_each_sample_once(file: Path) -> None:
    """After a line that a killed process has left unfinished."""
    file.write_text('{"data": "train_data", "row": 3')
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_to_list, args=(file, range(30))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = [json.loads(line)["row"] for line in file.read_text().splitlines()[1:]]
    assert sorted(rows) == list(range(30))


def test_a_folder_that_is_not_there_only_warns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch(Damaged(4), BadSampleList(tmp_path / "missing" / "bad_samples.jsonl", 5))
    assert "bad_samples.jsonl was not written" in capfd.readouterr().err
