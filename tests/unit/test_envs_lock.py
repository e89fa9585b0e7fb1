"""One builder at a time: with the file system's locks, and without."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echelon.envs import lock as locks
from echelon.envs.lock import Held, held, taken

HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
if sys.argv[2] == "lease":
    def flock(*args): raise OSError(errno.ENOLCK, "no locks available")
    fcntl.flock = flock
from echelon.envs.lock import held
with held(Path(sys.argv[1]), "it", print):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["flock", "lease"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system with locks, and one that says it has none, as NFS without its lock daemon."""
    if request.param == "lease":

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
    return str(request.param)


def test_one_has_it_and_then_the_next(tmp_path: Path, how: str) -> None:
    first = taken(tmp_path / "lock")
    assert first
    assert first.mine()
    assert taken(tmp_path / "lock") is None
    first.release()
    second = taken(tmp_path / "lock")
    assert second
    second.release()


def test_who_was_killed_holds_nothing(tmp_path: Path, how: str) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert taken(path) is None
        assert str(holder.pid) in locks.owner(path)
        holder.send_signal(signal.SIGKILL)
    lock = taken(path)
    assert lock
    lock.release()


def test_who_waits_says_so_and_for_whom(tmp_path: Path, how: str) -> None:
    path, said, order = tmp_path / "lock", [], []
    waits = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    def wait() -> None:
        with held(path, "this environment", say):
            order.append("second")

    with held(path, "this environment", print):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waits.wait(30)
        order.append("first")
    waiter.join(30)
    assert order == ["first", "second"]
    assert said == [f"waiting for {locks.owner(path)}, which has this environment under way"] or (
        f"process {os.getpid()} on " in said[0]
    )


def test_a_removed_file_is_no_lock(tmp_path: Path) -> None:
    """`clean` removes the file while it holds it; who opened it before must not have it."""
    path = tmp_path / "lock"
    first = taken(path)
    assert first
    stale = os.open(path, os.O_RDWR)
    path.unlink()
    first.release()
    assert not locks._is_still(stale, path)
    second = taken(path)
    assert second
    assert not locks._is_still(stale, path)
    os.close(stale)
    second.release()


def test_a_lease_that_stops_changing_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    lease = locks._lease(path)
    lease.write_text(json.dumps({"pid": 1, "host": "elsewhere", "token": "t"}))
    os.utime(lease, (1e9, 1e9))  # its host's clock may be years behind
    assert locks._Lease.taken(path) is None, "seen for the first time"
    assert locks._Lease.taken(path) is None
    os.utime(lease, (1e9 + 5, 1e9 + 5))
    assert locks._Lease.taken(path) is None, "it moved"
    monkeypatch.setattr(locks, "STALE_S", 0.0)
    mine: Held | None = locks._Lease.taken(path)
    assert mine
    assert mine.mine()


def test_who_lost_its_lease_knows(tmp_path: Path) -> None:
    lease = locks._Lease.taken(tmp_path / "lock")
    assert lease
    locks._lease(tmp_path / "lock").write_text(json.dumps({"token": "another"}))
    assert not lease.mine()
    lease.release()
    assert locks._lease(tmp_path / "lock").exists(), "that of the other"
