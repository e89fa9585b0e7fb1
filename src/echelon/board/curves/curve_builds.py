"""The open pyramids of this process, and the processes that read long files for them.

A few new lines are read at once, where they are asked for. A long file is read by a process of its
own: parsing a million lines in a thread of the server would hold up its other answers. This program
is that process: it is given run folders on its standard input, and says when each is done.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from echelon.board.curves.curve_file import DamagedCurvesError
from echelon.board.curves.curve_pyramid import MAX_FLUSH_BYTES, CurvePyramid
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason

_MAX_OPEN = 512
_MAX_UNWRITTEN_BYTES = 96 << 20
"""Of metrics.jsonl, whose points all open pyramids together have in memory alone."""
_IDLE_S = 20.0
"""After which a process without work ends."""
_READ_BYTES = 1 << 20


OnFault = Callable[[str], None]


class PyramidCache:
    """The pyramids that were looked at last."""

    def __init__(self) -> None:
        self._pyramids: OrderedDict[Path, CurvePyramid] = OrderedDict()
        self._lock = threading.Lock()
        self._builds = BuildQueue()
        self._reported = False

    def __len__(self) -> int:
        return len(self._pyramids)

    def refresh(self, run: Run, deadline: float) -> CurvePyramid:
        """Return the pyramid of a run with the lines that were added, as far as they could be read
        until a moment of time.monotonic(). A long file is left to another process: `share` says how
        far it is. Raises OSError if metrics.jsonl cannot be read."""
        pyramid = self._open(run)
        try:
            pyramid.look()
            if not pyramid.pending_bytes or self._builds.is_pending(run):
                return pyramid
            if pyramid.pending_bytes > MAX_FLUSH_BYTES:
                if not pyramid.is_in_memory:
                    self._builds.put(run, lambda fault: self._build_in_memory(run, fault))
                return pyramid
            while time.monotonic() < deadline and not pyramid.read_lines(_READ_BYTES):
                pass
            if pyramid.fault:
                self._report(pyramid.fault)
        except DamagedCurvesError:
            pyramid.discard_damaged_file()
        except FileNotFoundError:
            self._forget(run)
            raise
        return pyramid

    def _open(self, run: Run) -> CurvePyramid:
        with self._lock:
            pyramid = self._pyramids.get(run.folder)
            if pyramid is not None:
                self._pyramids.move_to_end(run.folder)
                return pyramid
            pyramid = self._pyramids[run.folder] = CurvePyramid(run)
            unwritten = sum(each.unwritten_bytes for each in self._pyramids.values())
            while len(self._pyramids) > 1 and (
                len(self._pyramids) > _MAX_OPEN or unwritten > _MAX_UNWRITTEN_BYTES
            ):
                dropped = self._pyramids.popitem(last=False)[1]
                unwritten -= dropped.unwritten_bytes
                dropped.close()
            return pyramid

    def _forget(self, run: Run) -> None:
        with self._lock:
            if (pyramid := self._pyramids.pop(run.folder, None)) is not None:
                pyramid.close()

    def _build_in_memory(self, run: Run, fault: str) -> None:
        """Read a long file here, since there is no place where another process could write it."""
        self._report(fault)
        pyramid = CurvePyramid(run, is_in_memory=True)
        with self._lock:
            self._pyramids[run.folder] = pyramid
        with contextlib.suppress(OSError):
            pyramid.look()
            while not pyramid.read_lines(_READ_BYTES):
                pass

    def _report(self, fault: str) -> None:
        with self._lock:
            if self._reported:
                return
            self._reported = True
        print(
            f"warning: curves cannot be kept in {fault}\n"
            "hint: they are kept in memory, and the next board reads metrics.jsonl again",
            file=sys.stderr,
        )


class BuildQueue:
    """Runs whose lines are read by processes, which are started when there is work."""

    def __init__(self) -> None:
        self._runs: queue.SimpleQueue[tuple[Run, OnFault]] = queue.SimpleQueue()
        self._pending: set[Path] = set()
        self._workers = 0
        self._lock = threading.Lock()
        self._max_workers = max(1, min(4, (os.cpu_count() or 1) // 2))

    def is_pending(self, run: Run) -> bool:
        """Return whether a run waits or is being read."""
        return run.folder in self._pending

    def put(self, run: Run, on_fault: OnFault) -> None:
        """Have a run read; `on_fault` is called if that one cannot write what it reads."""
        with self._lock:
            if run.folder in self._pending:
                return
            self._pending.add(run.folder)
            self._runs.put((run, on_fault))
            if self._workers < min(self._max_workers, len(self._pending)):
                self._workers += 1
                threading.Thread(target=self._serve, name="board-curves", daemon=True).start()

    def _serve(self) -> None:
        """Give runs to a process until there are none for a while."""
        process: subprocess.Popen[str] | None = None
        try:
            while (task := self._take()) is not None:
                run, on_fault = task
                try:
                    if process is None or process.poll() is not None:
                        process = _start_process()
                    if fault := _ask_process(process, run):
                        on_fault(fault)
                finally:
                    self._pending.discard(run.folder)
        finally:
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # it ends then
                process.wait()

    def _take(self) -> tuple[Run, OnFault] | None:
        with contextlib.suppress(queue.Empty):
            return self._runs.get(timeout=_IDLE_S)
        with self._lock:
            if self._runs.empty():
                self._workers -= 1
                return None
        return self._take()


def _start_process() -> subprocess.Popen[str]:
    # In a session of its own: Ctrl-C is for this process, after which the other ends too.
    return subprocess.Popen(
        [sys.executable, "-m", "echelon.board.curves.curve_builds"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
        encoding="utf-8",
    )


def _ask_process(process: subprocess.Popen[str], run: Run) -> str:
    """Have a run read, and return why it could not be; empty if it was."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(str(run.folder)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    if not answer:
        return f"{run.curves_folder}: the process that reads the lines ended with {process.wait()}"
    return str(json.loads(answer))


# --- the other process ---


def build_curves(run: Run, parent_pid: int | None = None) -> str:
    """Read all lines of a run and write its curves. Returns why they could not be written; empty
    if they were. It ends early without the process that asked for it."""
    pyramid = CurvePyramid(run)
    try:
        with pyramid.hold_file():
            pyramid.look()
            while not (is_whole := pyramid.read_lines(_READ_BYTES)):
                if pyramid.fault or parent_pid not in (None, os.getppid()):
                    break
            if is_whole and pyramid.is_worth_keeping:
                pyramid.flush()
    except DamagedCurvesError:
        pyramid.discard_damaged_file()
    except OSError as error:
        return f"{run.curves_folder}: {format_os_error_reason(error)}"
    pyramid.close()
    return pyramid.fault


def main() -> None:
    """Read the runs whose folders are written to the standard input, one after the other."""
    os.nice(10)
    gc.disable()  # a block of lines is many objects and no cycles
    parent_pid = os.getppid()
    for line in sys.stdin:
        fault = build_curves(Run(Path(json.loads(line))), parent_pid)
        gc.collect()
        if os.getppid() != parent_pid:
            return
        print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main()
