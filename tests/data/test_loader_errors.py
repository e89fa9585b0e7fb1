"""Loader processes that die, as they are noticed where batches are fetched, and by torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader
from torch.utils.data import _utils as loader_utils
from torch.utils.data._utils import signal_handling

from echelon.data import loader_errors
from echelon.data.batches import DatasetSource, EvalOrder
from echelon.data.loader_errors import explain_dead_loader, remove_death_signal
from echelon.errors import EchelonError, ExitCode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch installs its handler once in a process; another test may have removed it. And it looks
    only every five seconds whether its processes are alive."""
    monkeypatch.setattr(loader_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    fetch = dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(fetch, "__defaults__", (0.1,))
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Deadly(Dataset[torch.Tensor]):
    """One sample ends the process that loads it."""

    def __init__(self, death: int, at: int = 0) -> None:
        self._death, self._at = death, at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._at:
            if self._death < 0:
                os.kill(os.getpid(), -self._death)
            os._exit(self._death)
        return torch.ones(1000)


def require_explained(error: EchelonError | None, how: str, hint: str) -> None:
    assert error is not None
    assert error.exit == ExitCode.FAILED
    [fault] = error.faults
    assert "trainer.loader_workers=1" in fault.what
    assert how in fault.what
    assert hint in fault.do


@pytest.mark.parametrize(
    ("death", "at", "how", "hint"),
    [
        (-signal.SIGKILL, 0, "was killed by SIGKILL", "dmesg | tail"),
        (-signal.SIGKILL, 21, "was killed by SIGKILL", "dmesg | tail"),
        (3, 0, "ended with exit code 3", "trainer.loader_workers=0 loads in the training process"),
    ],
)
def test_a_dead_loader_process_is_explained(death: int, at: int, how: str, hint: str) -> None:
    """Also one that dies while the batches before are still being received."""
    source = DatasetSource(Deadly(death, at), workers=1)
    batches = source.iter_batches(EvalOrder(64, 2, 0, 1), 0, CPU)
    with pytest.raises(EchelonError) as caught:
        _count(batches)
    require_explained(caught.value, f"{how} while it fetched sample {at};", hint)


def test_what_torch_says_of_another_loader_is_explained() -> None:
    """With the signal where its handler is still there, else only that the process is gone."""
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Deadly(-signal.SIGKILL), num_workers=1)))
    require_explained(explain_dead_loader(caught.value, 1), "", "")


def test_another_error_is_left_alone() -> None:
    assert explain_dead_loader(RuntimeError("DataLoader has no attribute"), 1) is None
    of_a_user = ValueError("DataLoader worker (pid 3) exited unexpectedly")
    assert explain_dead_loader(of_a_user, 1) is None
    for words, how, hint in (
        ("is killed by signal: Killed. ", "was killed by SIGKILL;", "dmesg"),
        ("is killed by signal: Bus error. ", "was killed by SIGBUS;", "--shm-size"),
        ("exited unexpectedly with exit code 3. ", "ended with exit code 3;", "loader_workers=0"),
    ):
        error = RuntimeError(f"DataLoader worker (pid 3) {words}")
        require_explained(explain_dead_loader(error, 1), how, hint)


class Missing(Dataset[torch.Tensor]):
    """No sample can be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise FileNotFoundError("row.npy")


def test_an_error_of_a_sample_is_not_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the end of the process that has sent it."""
    monkeypatch.setattr(loader_errors, "wait", lambda *_: pytest.fail("waits for a process"))
    batches = DatasetSource(Missing(), workers=1).iter_batches(EvalOrder(4, 2, 0, 1), 0, CPU)
    with pytest.raises(FileNotFoundError, match="in DataLoader worker process 0"):
        _count(batches)


def test_no_signal_of_a_loader_process_raises_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would in the report of another failure. A handler of the user's stays."""

    def handle(number: int, frame: object) -> None:
        pass

    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal.signal(signal.SIGCHLD, handle)
    samples = DatasetSource(Deadly(3, 63), workers=1)
    next(samples.iter_batches(EvalOrder(64, 2, 0, 1), 0, CPU))
    assert signal_handling._SIGCHLD_handler_set, "torch has set its own in between"
    assert signal.getsignal(signal.SIGCHLD) is handle
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal_handling._set_SIGCHLD_handler()
    assert signal.getsignal(signal.SIGCHLD) is not handle
    remove_death_signal()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL


def _count(batches: Iterator[Any]) -> int:
    return sum(batch.sample_count for batch in batches)
