"""Indexing files in processes of their own, with a progress bar on a terminal.

The processes are programs rather than children of multiprocessing: those import the user's script
again, or are forked from a process that may hold locks and a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.index_layout import IndexTask
from echelon.errors import Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.object_store.urls import ObjectInfo

_BYTES_PER_PROCESS = 512 << 20
"""For less, a process is not worth its start."""
_AHEAD_BYTES = 128 << 20
"""Of the objects that are indexed next, fetched while others are indexed."""


def run_index_tasks(tasks: Sequence[IndexTask]) -> list[Fault]:
    """Index files and return what is wrong with them, in their order."""
    sizes = [_get_size(task.file) for task in tasks]
    cpus = len(os.sched_getaffinity(0))
    processes = min(cpus, len(tasks), sum(sizes) // _BYTES_PER_PROCESS)
    with _show_progress(sum(sizes)) as advance:
        if processes > 1:
            return _run_in_processes(tasks, sizes, advance, processes)
        faults: list[Fault] = []
        ahead = _FilesAhead([(task.file, size) for task, size in zip(tasks, sizes, strict=True)])
        for task, size in zip(tasks, sizes, strict=True):
            ahead.begin_file(size)
            faults += task.run()
            advance(size)
        return faults


def _run_in_processes(
    tasks: Sequence[IndexTask], sizes: Sequence[int], advance: Callable[[int], None], count: int
) -> list[Fault]:
    command = [sys.executable, "-m", "echelon.data.formats.index_worker"]
    found: dict[int, list[Fault]] = {}
    pending: SimpleQueue[int] = SimpleQueue()
    # The largest first, so that none is left alone at the end.
    order = sorted(range(len(tasks)), key=lambda i: -sizes[i])
    for number in order:
        pending.put(number)
    ahead = _FilesAhead([(tasks[number].file, sizes[number]) for number in order])

    def serve(worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(Empty, BrokenPipeError):
            while True:
                number = pending.get_nowait()
                found[number] = [_make_lost_fault(tasks[number])]
                with lock:
                    ahead.begin_file(sizes[number])
                worker.stdin.write(_write_task(tasks[number]))
                worker.stdin.flush()
                if not (line := worker.stdout.readline()):
                    return
                found[number] = [Fault(*words) for words in json.loads(line)]
                with lock:
                    advance(sizes[number])

    lock = threading.Lock()
    with contextlib.ExitStack() as cleanup:
        # Left last: its threads end when the processes do.
        threads = cleanup.enter_context(ThreadPoolExecutor(count))
        workers: list[subprocess.Popen[str]] = []
        pipe = subprocess.PIPE
        for _ in range(count):
            # In a session of its own: Ctrl-C is for this process, which ends the others.
            workers.append(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, encoding="utf-8", start_new_session=True
                )
            )
            cleanup.enter_context(workers[-1])
            cleanup.callback(workers[-1].kill)
        for served in [threads.submit(serve, worker) for worker in workers]:
            served.result()
    lost = [_make_lost_fault(task) for i, task in enumerate(tasks) if i not in found]
    return [fault for number in sorted(found) for fault in found[number]] + lost


class _FilesAhead:
    """Has objects fetched that will be indexed soon, in the order in which they will be."""

    def __init__(self, files: Sequence[tuple[DataPath, int]]) -> None:
        self._upcoming = deque(files)
        self._ahead_bytes = 0
        """Of the files that are named, and not begun."""

    def begin_file(self, size_bytes: int) -> None:
        """Name as many of the next files as are worth it, now that one is begun."""
        self._ahead_bytes -= size_bytes
        while self._upcoming and self._ahead_bytes < _AHEAD_BYTES:
            file, size = self._upcoming.popleft()
            if isinstance(file, RemoteFile):
                file.prefetch(0, _AHEAD_BYTES)
            self._ahead_bytes += size


def _make_lost_fault(task: IndexTask) -> Fault:
    return Fault(
        f"the process that indexed {task.file} ended before it was done",
        "see above for why, and `dmesg | tail` for whether memory ran out",
    )


def _write_task(task: IndexTask) -> str:
    given = task.build_one
    build_one = given if isinstance(given, partial) else partial(given)
    file = list(task.file.info) if isinstance(task.file, RemoteFile) else str(task.file)
    words = [file, str(task.target), task.kind]
    words += [build_one.func.__module__, build_one.func.__name__]
    return json.dumps([*words, build_one.keywords]) + "\n"


def _get_size(file: DataPath) -> int:
    with contextlib.suppress(OSError):
        return get_size(file)
    return 0


@contextlib.contextmanager
def _show_progress(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many bytes are done; on a terminal it draws a bar."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("indexing"), BarColumn(None), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, advance=done)


def main() -> None:
    """Index the files that standard input names, a line each, and answer each with its faults."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a module prints is no answer
    for line in sys.stdin:
        file, target, kind, module, name, options = json.loads(line)
        build_one = partial(getattr(importlib.import_module(module), name), **options)
        path = Path(file) if isinstance(file, str) else RemoteFile(ObjectInfo(*file))
        faults = IndexTask(path, Path(target), kind, build_one).run()
        answers.write(json.dumps(faults) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
