"""Rows of many runs, read by several processes at once where there are many.

``python -m echelon.board.row_reader`` is one of these processes. It reads lines of JSON,
``{"folders": […], "sweeps": […]}``, and answers each with a line per folder: its signature and its
row, or an empty one where there is no run any more. It ends with its input, so with the board.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from echelon.board.run_rows import RunRowText, read_row_text

if TYPE_CHECKING:
    from echelon.board.run_rows import AskSlurm

_CHUNK = 50
_MIN_FOLDERS = 400
"""Fewer are read sooner than a process starts."""
_MAX_PROCESSES = 8
_FETCHERS = 16
_FETCHED_BYTES = 1 << 16


def read_rows(
    folders: Sequence[str], sweeps: Collection[str], ask_slurm: AskSlurm
) -> Iterator[list[RunRowText]]:
    """Yield the rows of runs, some at a time. Of folders that are gone there is none.

    Where several processes read, Slurm is not asked: what is active is read again later.
    """
    chunks = [folders[i : i + _CHUNK] for i in range(0, len(folders), _CHUNK)]
    if len(folders) < _MIN_FOLDERS:
        for chunk in chunks:
            yield _read_chunk(chunk, sweeps, ask_slurm)
        return
    waiting = queue.SimpleQueue[Sequence[str]]()
    for chunk in chunks:
        waiting.put(chunk)
    done = queue.SimpleQueue[list[RunRowText]]()
    count = max(1, min(_MAX_PROCESSES, len(os.sched_getaffinity(0)), len(chunks) // 4))
    for _ in range(count):
        threading.Thread(target=_feed_process, args=(waiting, done, sweeps), daemon=True).start()
    for _ in chunks:
        yield done.get()


def _read_chunk(
    folders: Sequence[str], sweeps: Collection[str], ask_slurm: AskSlurm | None = None
) -> list[RunRowText]:
    rows = []
    for folder in folders:
        with contextlib.suppress(OSError):
            rows.append(read_row_text(folder, sweeps, ask_slurm))
    return rows


def _feed_process(
    waiting: queue.SimpleQueue[Sequence[str]],
    done: queue.SimpleQueue[list[RunRowText]],
    sweeps: Collection[str],
) -> None:
    """Have chunks read by a process of its own, until there are none; where that is not to be had,
    by this thread."""
    process: subprocess.Popen[bytes] | None = None
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",  # -m looks there for modules first
        )
    try:
        while True:
            chunk = waiting.get_nowait()
            rows = None
            if process is not None:
                with contextlib.suppress(OSError, ValueError):
                    rows = _ask_process(process, chunk, sweeps)
                if rows is None:
                    process.kill()
                    process.wait()
                    process = None
            done.put(_read_chunk(chunk, sweeps) if rows is None else rows)
    except queue.Empty:
        pass
    finally:
        if process is not None:
            with process:  # closes its input, by which it ends
                pass


def _ask_process(
    process: subprocess.Popen[bytes], folders: Sequence[str], sweeps: Collection[str]
) -> list[RunRowText]:
    """Return the rows of some runs. Raises OSError or ValueError if the process does not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    request = {"folders": list(folders), "sweeps": sorted(sweeps)}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    rows = []
    for folder in folders:
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError("it has ended")
        signature, _, text = line.rstrip(b"\n").partition(b" ")
        if text:
            rows.append(RunRowText(os.path.basename(folder), signature.decode(), text))
    return rows


def _fetch(folder: str) -> None:
    """Have the kernel read the small files of a run from the disk."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                number = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(number, 0, _FETCHED_BYTES, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(number)


def main() -> None:
    """Be one of the processes."""
    fetchers = ThreadPoolExecutor(_FETCHERS)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # A disk answers many questions in the time of one.
        list(fetchers.map(_fetch, asked["folders"]))
        sweeps = frozenset(asked["sweeps"])
        answers = []
        for folder in asked["folders"]:
            answer = b""
            with contextlib.suppress(OSError):
                row = read_row_text(folder, sweeps)
                answer = b"%b %b" % (row.signature.encode(), row.text)
            answers.append(answer)
        sys.stdout.buffer.write(b"\n".join(answers) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
