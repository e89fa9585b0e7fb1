"""What a page hears of runs that change, without asking."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from board_server import run_board
from run_folders import STARTED, lines, make_run

from echelon.board import folder_watch, live_updates
from echelon.board.folder_watch import FolderWatch, is_remote
from echelon.board.server import Board
from echelon.runs.annotations import annotate_run
from echelon.runs.process_record import identify_process, identify_this_process
from echelon.runs.run_folder import Run

LIMIT_S = 60.0


class Page:
    """A page that listens to a board of this process."""

    def __init__(self, board: Board, *watched: str, generation: int | None = None) -> None:
        """`generation` is that of the rows which the page has: those of now, unless it is given."""
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.is_closed = threading.Event()
        known = board.index.generation if generation is None else generation
        pieces = board.watch.listen(known, watched)
        next(pieces)
        self.row_events = 0
        threading.Thread(target=self._read, args=(pieces,), daemon=True).start()

    def _read(self, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            for event in piece.decode().split("\n\n"):
                if event.startswith("event: "):
                    name, data = event.split("\n", 1)
                    self.row_events += name == "event: rows"
                    self._events.put((name[7:], json.loads(data[6:])))
            if self.is_closed.is_set():
                break
        pieces.close()  # type: ignore[attr-defined]

    def wait_for(self, condition: Callable[[str, Any], Any]) -> Any:
        """What the condition returns of the first event for which it is true."""
        until = time.monotonic() + LIMIT_S
        while True:
            name, data = self._events.get(timeout=max(0.0, until - time.monotonic()))
            if found := condition(name, data):
                return found

    def wait_for_row(self, run_id: str, condition: Callable[[Any], bool] = bool) -> Any:
        def find(name: str, data: Any) -> Any:
            rows = data["changed"] if name == "rows" else []
            return next((row for row in rows if row["id"] == run_id and condition(row)), None)

        return self.wait_for(find)

    def wait_until_complete(self) -> None:
        self.wait_for(lambda name, data: name == "rows" and data["complete"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def open_page() -> Iterator[Callable[..., Page]]:
    """Opens pages, which are closed at the end."""
    pages: list[Page] = []

    def open_one(board: Board, *watched: str, generation: int | None = None) -> Page:
        pages.append(Page(board, *watched, generation=generation))
        return pages[-1]

    yield open_one
    for page in pages:
        page.is_closed.set()


@pytest.fixture(params=["watched", pytest.param("polled", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How changes become known: as on a local disk, or as on a network file system."""
    if request.param == "polled":
        for number in (0xEF53, 0x794C7630, 0x01021994, 0x9123683E, 0x58465342, 0x2FC12FC1):
            monkeypatch.setitem(folder_watch._REMOTE_FILE_SYSTEMS, number, "of this test")
        if not is_remote(root):
            pytest.skip("a file system that this test does not know")
    return str(request.param)


def append(run: Run, **line: Any) -> None:
    with run.metrics_file.open("a") as file:
        file.write(json.dumps(line) + "\n")


def make_active(root: Path, name: str, **more: Any) -> Run:
    status = {"state": "running", "process": identify_this_process(), **more}
    return make_run(root, name, lines(4), status=status)


def test_a_page_hears_of_everything(root: Path, way: str, open_page: Callable[..., Page]) -> None:
    active = make_active(root, "active")
    other = make_active(root, "other")
    finished = make_run(root, "finished", lines())
    board = Board([root])
    page = open_page(board, "0:active")
    page.wait_until_complete()
    # A value that is logged, with an event for curves where it is looked at.
    append(active, step=5, loss=0.25)
    page.wait_for(lambda name, data: name == "metrics" and data["runs"] == ["0:active"])
    append(active, step=6, loss=0.125)
    append(other, step=6, loss=7.5)
    row = page.wait_for_row("0:other", lambda row: row["metrics"]["loss"][0] == 7.5)
    assert row["step"] == 6
    # Logs of a run that is looked at.
    deadline = time.monotonic() + LIMIT_S
    log = active.get_rank_log_file(0)
    told = threading.Event()

    def write() -> None:
        while not told.is_set() and time.monotonic() < deadline:
            with log.open("a") as file:
                file.write("a line\n")
            told.wait(0.2)

    writer = threading.Thread(target=write)
    writer.start()
    page.wait_for(lambda name, data: name == "logs" and data["runs"] == ["0:active"])
    told.set()
    writer.join()
    # A note, by somebody else.
    annotate_run(finished, "seen", ["good"], [])
    row = page.wait_for_row("0:finished", lambda row: row["note"] == "seen")
    assert row["tags"] == ["good"]
    # Runs that come and go, and one that comes back as another.
    make_run(root, "new", lines(), lr=0.5)
    page.wait_for_row("0:new", lambda row: row["settings"].get("lr") == 0.5)
    shutil.rmtree(root / "new")
    page.wait_for(lambda name, data: name == "rows" and "0:new" in data["removed"])
    make_run(root, "new", lines(), lr=0.75)
    page.wait_for_row("0:new", lambda row: row["settings"].get("lr") == 0.75)
    finished.folder.rename(root / "renamed")
    page.wait_for_row("0:renamed")
    # An end.
    active.update_status(state="finished")
    page.wait_for_row("0:active", lambda row: row["state"] == "finished")


def test_a_run_that_was_killed_is_lost(root: Path, open_page: Callable[..., Page]) -> None:
    """No file says so."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        make_active(root, "a", process=identify_process(process.pid))
        page = open_page(Board([root]))
        page.wait_until_complete()
        process.kill()
        process.wait()
        page.wait_for_row("0:a", lambda row: row["state"] == "lost")
    finally:
        process.kill()
        process.wait()


def test_nothing_is_read_while_no_page_is_open(
    root: Path, monkeypatch: pytest.MonkeyPatch, open_page: Callable[..., Page]
) -> None:
    monkeypatch.setattr(live_updates, "_LINGER_S", 0.0)
    run = make_active(root, "a")
    board = Board([root])
    pieces = board.watch.listen(board.index.generation, ())
    for piece in pieces:
        if b'"complete":true' in piece:
            break
    pieces.close()  # type: ignore[attr-defined]
    until = time.monotonic() + LIMIT_S
    while board.index.is_complete:
        assert time.monotonic() < until
        time.sleep(0.02)
    generation = board.index.generation
    append(run, step=9, loss=0.5)
    page = open_page(board)
    page.wait_for_row("0:a", lambda row: row["metrics"]["loss"][0] == 0.5)
    assert board.index.generation > generation


_SQUEUE = """#!/bin/sh
echo called >> "{calls}"
echo "77|PENDING|Resources"
"""


def test_slurm_is_asked_seldom_and_nobody_waits_for_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_page: Callable[..., Page]
) -> None:
    calls, tools = tmp_path / "calls", tmp_path / "bin"
    tools.mkdir()
    for name in ("squeue", "sacct"):
        (tools / name).write_text(_SQUEUE.format(calls=calls))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for i in range(20):
        status = {"state": "queued", "launcher": "slurm", "job": "77"}
        make_run(root, f"job-{i}", status=status)
    board = Board([root])
    before = board.index.generation  # of both: Slurm may answer before the second one listens
    pages = [open_page(board, generation=before) for _ in range(2)]
    row = pages[0].wait_for_row("0:job-3", lambda row: row["why"] == "Resources")
    assert (row["state"], row["job"]) == ("queued", "77")
    pages[1].wait_for_row("0:job-4", lambda row: row["why"] == "Resources")
    assert len(calls.read_text().splitlines()) == 1


def test_events_are_few_however_much_happens(root: Path, open_page: Callable[..., Page]) -> None:
    runs = [make_active(root, f"run-{i}") for i in range(5)]
    board = Board([root])
    page = open_page(board)
    page.wait_until_complete()
    before, began = page.row_events, time.monotonic()
    for step in range(100):
        for run in runs:
            append(run, step=10 + step, loss=1.0 / (1 + step))
        time.sleep(0.01)
    page.wait_for_row("0:run-0", lambda row: row["metrics"]["loss"][0] == pytest.approx(0.01))
    took_s = time.monotonic() - began
    assert page.row_events - before <= 2 + 4 * took_s, "at most four times a second"


def test_a_folder_watch_says_when_it_has_lost_events(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip("the queue is too long to fill")
    watch = FolderWatch()
    assert watch.add(str(tmp_path))
    path = tmp_path / "a"
    for _ in range(limit // 2 + 10):
        path.touch()
        path.unlink()
    assert len(list(watch.read_events())) <= limit
    assert watch.has_overflowed
    assert not watch.add(str(tmp_path / "missing"))
    watch.close()
    assert list(watch.read_events()) == []


@pytest.mark.slow
def test_two_pages_of_a_server_and_a_run_that_trains(tmp_path: Path) -> None:
    with run_board(str(tmp_path), cache=tmp_path / "cache") as board:
        generation = board.get_rows_until(lambda data: data["complete"])["generation"]
        pages = [board.listen(generation, "0:toy") for _ in range(2)]
        words = ["run.name=toy", f"run.dir={tmp_path}", "samples=64", "trainer.epochs=1"]
        command = [sys.executable, "-m", "echelon", "train", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
        for page in pages:
            row = page.wait_for_row("0:toy", lambda row: row["state"] == "finished")
            assert row["step"] == 2
        pages[0].close()
        annotate_run(Run(tmp_path / "toy"), "x", [], [])
        pages[1].wait_for_row("0:toy", lambda row: row["note"] == "x")
        assert board.stop(signal.SIGTERM) == 0


def test_a_page_of_another_start_begins_anew(root: Path) -> None:
    board = Board([root])
    assert list(board.watch.listen(int(STARTED), ())) == [b"event: reload\ndata: {}\n\n"]
    assert list(board.watch.listen(board.index.generation + 5, ())) == [
        b"event: reload\ndata: {}\n\n"
    ]
