"""Loader processes that die, as torch notices it."""

from __future__ import annotations

import os
import signal

import pytest
from torch.utils.data import DataLoader, Dataset

from echelon.data.loader_errors import explain_dead_loader
from echelon.errors import ExitCode


class Deadly(Dataset[int]):
    """A sample ends the process that loads it."""

    def __init__(self, death: int) -> None:
        self._death = death

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self._death < 0:
            os.kill(os.getpid(), -self._death)
        os._exit(self._death)


@pytest.mark.parametrize(
    ("death", "how", "hint"),
    [
        (-signal.SIGKILL, "was killed by a signal (Killed)", "dmesg | tail"),
        (-signal.SIGBUS, "was killed by a signal (Bus error)", "--shm-size"),
        (3, "ended", "trainer.loader_workers=0 loads in the training process"),
    ],
)
def test_a_dead_loader_process_is_explained(death: int, how: str, hint: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Deadly(death), num_workers=1)))
    error = explain_dead_loader(caught.value, 1)
    assert error is not None
    assert error.exit == ExitCode.FAILED
    [fault] = error.faults
    assert "trainer.loader_workers=1" in fault.what
    assert how in fault.what
    assert hint in fault.do


def test_another_error_is_left_alone() -> None:
    assert explain_dead_loader(RuntimeError("DataLoader has no attribute"), 1) is None
    assert (
        explain_dead_loader(ValueError("DataLoader worker (pid 3) exited unexpectedly"), 1) is None
    )
