"""One builder at a time, and a file system without locks is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from echelon.environments.build_lock import lock_if_unused, try_lock, wait_for_lock
from echelon.errors import EchelonError
from echelon.utils.locks import describe_owner


def test_one_process_holds_the_lock_at_a_time(tmp_path: Path) -> None:
    first = try_lock(tmp_path / "lock")
    assert first
    assert try_lock(tmp_path / "lock") is None
    first.release()
    second = try_lock(tmp_path / "lock")
    assert second
    second.release()


def test_waiting_prints_the_owner(tmp_path: Path) -> None:
    path, lines, order = tmp_path / "lock", [], []
    waits = threading.Event()

    def print_line(line: str) -> None:
        lines.append(line)
        waits.set()

    def wait() -> None:
        with wait_for_lock(path, "this environment", print_line):
            order.append("second")

    with wait_for_lock(path, "this environment", print):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waits.wait(300)
        order.append("first")
    waiter.join(300)
    assert order == ["first", "second"]
    assert lines == [f"waiting for {describe_owner(path)}, which has locked this environment"]
    assert f"process {os.getpid()} on " in lines[0]


def test_a_shared_lock_counts_as_use(tmp_path: Path) -> None:
    path = tmp_path / "use"
    with lock_if_unused(path) as unused:
        assert unused
    assert not path.exists(), "looking makes no file"
    with path.open("w") as job:
        fcntl.flock(job, fcntl.LOCK_SH)
        with lock_if_unused(path) as unused:
            assert not unused
    with lock_if_unused(path) as unused:
        assert unused
        assert try_lock(path) is None


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS without its lock daemon."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(EchelonError, match="is on a file system without locks") as caught:
        try_lock(tmp_path / "lock")
    assert "ECHELON_CACHE" in caught.value.faults[0].do
    (tmp_path / "use").touch()
    with lock_if_unused(tmp_path / "use") as unused:
        assert unused, "nothing can be known"
