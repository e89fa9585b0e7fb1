"""Loader processes: started once, serving every epoch, and how the user's code sees them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_samples import SIZE, ProcessNumbers, RandomSamples
from torch.utils.data import _utils as loader_utils
from torch.utils.data import dataloader, get_worker_info

from echelon.data.batches import BatchOrder, DatasetSource, EvalOrder, MakeNextOrder, make_source
from echelon.data.sample_order import EpochOrder
from echelon.errors import EchelonError, ExitCode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch looks only every five seconds whether its processes are alive."""
    monkeypatch.setattr(loader_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    fetch = dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(fetch, "__defaults__", (0.1,))
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def source() -> Iterator[DatasetSource]:
    source = DatasetSource(ProcessNumbers(), workers=2, options={"prefetch_factor": 2})
    yield source
    source.close()


def order(epoch: int = 0) -> EpochOrder:
    return EpochOrder(SIZE, 3, 0, 1, 0, epoch)


def pids_of(batches: Iterator[Any]) -> set[int]:
    return {int(pid) for batch in batches for pid in batch.data[:, 1]}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_processes_serve_every_epoch(source: DatasetSource) -> None:
    first = pids_of(source.iter_batches(order(0), 0, CPU))
    assert len(first) == 2
    assert os.getpid() not in first
    assert pids_of(source.iter_batches(order(1), 0, CPU)) == first
    next(left_early := source.iter_batches(order(2), 0, CPU))
    left_early.close()  # type: ignore[attr-defined]
    rows = [batch.data[:, 0].tolist() for batch in source.iter_batches(order(3), 4, CPU)]
    indices, counts = next(order(3).iter_blocks(4))
    assert rows[0] == indices[: counts[0]].tolist()
    assert pids_of(source.iter_batches(EvalOrder(SIZE, 3, 0, 1), 0, CPU)) == first
    source.close()
    assert not any(map(is_running, first))


def make_next(last: int, begun: list[int]) -> MakeNextOrder:
    """The epoch after an order, up to the last; notes which was asked for."""

    def make(current: BatchOrder) -> EpochOrder | None:
        if current.epoch == last:
            return None
        begun.append(current.epoch + 1)
        return order(current.epoch + 1)

    return make


def rows_of(batches: Iterator[Any]) -> list[int]:
    return [index for batch in batches for index in batch.data[:, 0].tolist()]


def test_the_next_epoch_is_fetched_before_it_is_asked_for(source: DatasetSource) -> None:
    """And what was fetched is what the epoch begins with, also where it was not the right one."""
    alone = [
        rows_of(DatasetSource(ProcessNumbers(), 0).iter_batches(order(e), 0, CPU)) for e in range(4)
    ]
    begun: list[int] = []
    for epoch in range(3):
        batches = source.iter_batches(order(epoch), 0, CPU, make_next(2, begun))
        assert rows_of(batches) == alone[epoch]
        assert begun == list(range(1, min(epoch + 1, 2) + 1))
    begun.clear()
    assert rows_of(source.iter_batches(order(0), 0, CPU, make_next(3, begun))) == alone[0]
    assert begun == [1]
    assert rows_of(source.iter_batches(order(3), 0, CPU)) == alone[3]
    assert rows_of(source.iter_batches(order(1), 0, CPU, make_next(3, begun))) == alone[1]
    next(left_early := source.iter_batches(order(2), 0, CPU, make_next(3, begun)))
    left_early.close()  # type: ignore[attr-defined]
    assert rows_of(source.iter_batches(order(2), 0, CPU)) == alone[2]


def test_epochs_shorter_than_what_is_fetched_ahead(source: DatasetSource) -> None:
    def short(epoch: int) -> EpochOrder:
        return EpochOrder(3, 3, 0, 1, 0, epoch)

    rows = [
        rows_of(source.iter_batches(short(e), 0, CPU, lambda done: short(done.epoch + 1)))
        for e in range(9)
    ]
    assert rows == [
        rows_of(DatasetSource(ProcessNumbers(), 0).iter_batches(short(e), 0, CPU)) for e in range(9)
    ]


def test_an_error_of_the_next_epoch_waits_for_it(source: DatasetSource) -> None:
    """It must not cost the end of this one."""

    def fail(current: BatchOrder) -> EpochOrder:
        raise ValueError("no such epoch")

    assert len(rows_of(source.iter_batches(order(0), 0, CPU, fail))) == SIZE
    assert len(rows_of(source.iter_batches(order(1), 0, CPU))) == SIZE


def test_one_batch_is_fetched_beside_the_processes(source: DatasetSource) -> None:
    batches = source.iter_batches(order(), 0, CPU)
    first = next(batches).data[:, 0].tolist()
    alone = source.fetch_batch(order(), 0, CPU).data
    assert alone[:, 0].tolist() == first
    assert set(alone[:, 1].tolist()) == {os.getpid()}
    rest = [index for batch in batches for index in batch.data[:, 0].tolist()]
    assert sorted(first + rest) == list(range(SIZE))


def test_a_process_that_dies_between_epochs_is_explained(source: DatasetSource) -> None:
    pid = min(pids_of(source.iter_batches(order(), 0, CPU)))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EchelonError, match="was killed by SIGKILL") as caught:
        pids_of(source.iter_batches(order(1), 0, CPU))
    assert caught.value.exit == ExitCode.FAILED


class Opened(RandomSamples):
    """Has what worker_init_fn gives it."""

    opened_by = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.opened_by])


def open_files(worker: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, Opened)
    info.dataset.opened_by = worker


def test_worker_init_fn_sees_the_users_dataset() -> None:
    options = {"worker_init_fn": open_files, "prefetch_factor": 1}
    source = make_source(Opened(), "train_data", 2, CPU, options=options)
    assert pids_of(source.iter_batches(order(), 0, CPU)) == {0, 1}
    source.close()


def test_processes_end_with_the_epoch_where_that_is_asked_for() -> None:
    source = DatasetSource(ProcessNumbers(), 1, options={"persistent_workers": False})
    first, again = (pids_of(source.iter_batches(order(), 0, CPU)) for _ in range(2))
    assert first != again


def test_an_option_that_torch_refuses() -> None:
    with pytest.raises(EchelonError, match="prefetch_factor option should be non-negative"):
        make_source(Opened(), "train_data", 1, CPU, options={"prefetch_factor": -1})


class Waiting(RandomSamples):
    """The parent never writes into the pipe."""

    def __init__(self) -> None:
        self.pipe = os.pipe()

    def __getitem__(self, index: int) -> torch.Tensor:
        os.read(self.pipe[0], 1)
        return torch.ones(1)


def test_a_batch_that_does_not_come_in_time() -> None:
    data = Waiting()
    source = make_source(data, "train_data", 1, CPU, options={"timeout": 0.2})
    with pytest.raises(EchelonError, match=r"'timeout': 0\.2") as caught:
        next(source.iter_batches(order(), 0, CPU))
    assert caught.value.exit == ExitCode.FAILED
    for end in data.pipe:
        os.close(end)
    source.close()
