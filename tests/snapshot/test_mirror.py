"""The mirror of a training: what waits, what is tried again, what is said, and when it is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_runner import until as wait_until
from object_store_server import ObjectStoreServer, serve_object_store

from echelon.snapshot import mirror as mirror_module
from echelon.snapshot.layout import list_snapshots
from echelon.snapshot.mirror import MirrorProcess, SnapshotMirror
from echelon.snapshot.writer import SnapshotWriter

OWNER = ["run", "start"]

pytestmark = pytest.mark.slow  # each starts the process of a mirror


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    monkeypatch.setattr(mirror_module, "_RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(mirror_module, "_CLOSING_RETRY_S", 0.05)
    with serve_object_store() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def url(server: ObjectStoreServer) -> str:
    return f"s3://{server.bucket}/runs/a"


@pytest.fixture
def process() -> Iterator[MirrorProcess]:
    process = MirrorProcess()
    yield process
    process.close()


def until(true: Callable[[], bool]) -> bool:
    return bool(wait_until(true, 60, "the mirror"))


def close(mirror: SnapshotMirror, limit_s: float | None = None) -> None:
    mirror.close(limit_s, lambda seconds: None)


def save(writer: SnapshotWriter, *steps: int, best: tuple[int, ...] = ()) -> None:
    for step in steps:
        parts = {"model": {"w": torch.full((50,), float(step))}}
        writer.save(step, parts, {"step": step}, is_best=step in best)
        [saved] = writer.wait()
        assert saved.error is None


def mirrored(server: ObjectStoreServer) -> list[int]:
    ends = "/manifest.json"
    keys = server.list_keys("runs/a/step-")
    return [int(key.split("/")[2][5:]) for key in keys if key.endswith(ends)]


class Gate:
    """Requests that write wait here until they are let through."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.is_reached = threading.Event()

    def __call__(self, method: str, path: str) -> int | None:
        if method in ("PUT", "POST"):
            self.is_reached.set()
            assert self.opened.wait(60)
        return None


def test_saved_snapshots_arrive_and_old_ones_go(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    writer = SnapshotWriter(tmp_path, keep_last=2)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=2)
    writer.mirror_to(mirror)
    for step in (1, 2, 3, 4):
        save(writer, step, best=(1,))
        assert until(lambda step=step: mirror.mirrored_step == step)  # type: ignore[misc]
    writer.close()
    close(mirror)
    assert mirrored(server) == [1, 3, 4]
    assert server.get("runs/a/best") == b"step-000000001\n"
    assert (mirror.problem, mirror.take_messages()) == (None, [])


def test_a_newer_one_takes_the_place_of_those_that_wait(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.decide = gate = Gate()
    writer = SnapshotWriter(tmp_path, keep_last=1)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=9)
    writer.mirror_to(mirror)
    save(writer, 1)
    assert gate.is_reached.wait(60)
    save(writer, 2, 3, 4)
    assert [f.name[-1] for f in list_snapshots(tmp_path)] == ["1", "4"]  # 1 is being read
    gate.opened.set()
    writer.close()
    close(mirror)
    assert mirrored(server) == [1, 4]
    save(SnapshotWriter(tmp_path, keep_last=1, resumed_step=4), 5)
    assert [f.name[-1] for f in list_snapshots(tmp_path)] == ["5"]


def test_the_best_one_is_mirrored_though_a_newer_one_came(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.decide = gate = Gate()
    writer = SnapshotWriter(tmp_path, keep_last=1)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=1)
    writer.mirror_to(mirror)
    save(writer, 1, 2, 3, best=(2,))
    gate.opened.set()
    writer.close()
    close(mirror)
    assert mirrored(server) == [2, 3]
    assert server.get("runs/a/best") == b"step-000000002\n"


def test_the_snapshot_that_a_run_resumes_from_is_mirrored(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    save(SnapshotWriter(tmp_path), 8)
    writer = SnapshotWriter(tmp_path, resumed_step=8)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=1)
    writer.mirror_to(mirror)
    close(mirror)
    assert mirrored(server) == [8]


def test_an_outage_costs_one_warning(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.decide = lambda method, path: 403
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1)
    assert until(lambda: mirror.problem is not None)
    tries = len(server.requests)
    assert until(lambda: len(server.requests) > tries + 2)
    save(writer, 2)
    [warning] = mirror.take_messages()
    assert warning.startswith(f"warning: step 1 is not mirrored to {url} yet: ")
    assert warning.endswith("; the training goes on, and it is tried again")
    server.decide = None
    assert until(lambda: mirror.mirrored_step == 2)
    writer.close()
    close(mirror)
    assert mirrored(server) == [2]
    assert mirror.take_messages() == [f"the mirror {url} is reached again: step 2 is there"]


def test_a_store_that_never_answers_is_an_outage(
    server: ObjectStoreServer,
    url: str,
    process: MirrorProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ECHELON_STORE_TIMEOUT_S", "1")
    monkeypatch.setenv("ECHELON_STORE_RETRIES", "0")
    server.answer = "hang"
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1)
    assert until(lambda: mirror.problem is not None)
    assert "no whole answer within 1 s" in str(mirror.problem)
    server.answer = None
    server.delay_s = 0.02
    assert until(lambda: mirror.mirrored_step == 1)
    writer.close()
    close(mirror)


def test_a_process_that_is_killed_is_started_again(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.decide = gate = Gate()
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1)
    assert gate.is_reached.wait(60)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    gate.opened.set()
    assert until(lambda: mirror.mirrored_step == 1)
    writer.close()
    close(mirror)
    assert "its process ended with code -9" in mirror.take_messages()[0]


@pytest.mark.parametrize("limit_s", [0.2, None])
def test_a_store_that_never_answers_is_left_at_the_end(
    limit_s: float | None,
    server: ObjectStoreServer,
    url: str,
    process: MirrorProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "STALL_S", 0.2)
    server.decide = gate = Gate()
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1)
    writer.close()
    assert gate.is_reached.wait(60)
    close(mirror, limit_s)
    gate.opened.set()
    assert mirror.problem == ("it took longer than 0 s" if limit_s else "nothing moved for 0 s")
    assert mirror.mirrored_step is None
    assert mirror.take_messages() == []
    assert process._process is not None
    assert process._process.poll() is not None


def test_a_store_that_refuses_is_left_at_the_end(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.decide = lambda method, path: 403
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1)
    writer.close()
    close(mirror)
    assert mirror.problem is not None
    assert "403" in mirror.problem


def test_another_start_that_takes_the_mirror_ends_it(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    server.put("runs/a/owner.json", b'{"run": "run", "start": "later"}')
    writer = SnapshotWriter(tmp_path)
    mirror = SnapshotMirror(process, url, OWNER, keep_last=3)
    writer.mirror_to(mirror)
    save(writer, 1, 2)
    writer.close()
    close(mirror)
    assert mirrored(server) == []
    assert mirror.list_needed() == set()
    [warning] = mirror.take_messages()
    assert warning == (
        f"warning: snapshots are no longer mirrored to {url}: another start of this run writes to "
        "it now"
    )


def test_the_process_ends_with_the_training(
    server: ObjectStoreServer, url: str, process: MirrorProcess, tmp_path: Path
) -> None:
    process.ask("take", url, owner_file=str(tmp_path / "owner.json"))
    assert process._process is not None
    process._process.stdin.close()  # type: ignore[union-attr]
    assert process._process.wait(60) == 0
