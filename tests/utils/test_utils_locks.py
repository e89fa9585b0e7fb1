"""A lock that goes with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echelon.utils.locks import FileLock, LocksUnsupportedError, describe_owner

HOLD = """
import subprocess, sys
from pathlib import Path
from echelon.utils.locks import FileLock
with FileLock(Path(sys.argv[1]), records_owner=True) as lock:
    child = subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()] if sys.argv[2:] else [])
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def hold(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_child_pid(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout
    return int(holder.stdout.readline())


def test_a_second_holder_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with first:
        assert not second.try_acquire()
        with first:
            assert not second.try_acquire(), "taken twice by its holder"
        assert not second.try_acquire(), "released once only"
    assert second.try_acquire()
    second.release()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path)
    with hold(path) as holder:
        child = read_child_pid(holder)
        assert not lock.try_acquire()
        assert describe_owner(path).startswith(f"process {holder.pid} on ")
        holder.kill()
    assert lock.try_acquire()
    lock.release()
    os.kill(child, signal.SIGKILL)


def test_a_child_that_inherits_it_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold(path, "inherited") as holder:
        child = read_child_pid(holder)
        holder.kill()
    lock = FileLock(path)
    assert not lock.try_acquire()
    os.kill(child, signal.SIGKILL)
    with lock:  # waits for the kernel to end the child
        pass


def test_one_that_waits_gets_it(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with FileLock(tmp_path / "lock"):
            order.append("second")

    with FileLock(tmp_path / "lock"):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.1)
        order.append("first")
    waiter.join(300)
    assert order == ["first", "second"]


def test_a_file_that_was_removed_guards_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opened it before its removal must not take it for the lock."""
    path, flock = tmp_path / "lock", fcntl.flock

    def remove_first(handle: int, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(handle, flags)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = FileLock(path)
    assert not lock.try_acquire()
    monkeypatch.setattr(fcntl, "flock", remove_first)
    with lock:
        assert path.exists(), "a new one"
        assert not FileLock(path).try_acquire()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LocksUnsupportedError):
        FileLock(tmp_path / "lock").try_acquire()


@pytest.mark.parametrize("content", ["", "{}", "[]", "no json"])
def test_an_owner_that_is_not_recorded_is_another_process(tmp_path: Path, content: str) -> None:
    assert describe_owner(tmp_path / "lock") == "another process"
    (tmp_path / "lock").write_text(content)
    assert describe_owner(tmp_path / "lock") == "another process"


def test_a_link_in_place_of_a_lock_does_not_lead_to_a_file_of_ours(tmp_path: Path) -> None:
    """In a folder that others may write, anybody can make the link before us."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        FileLock(tmp_path / "lock", records_owner=True).acquire()
    assert (tmp_path / "precious").read_text() == "kept"
