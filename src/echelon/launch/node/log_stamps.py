"""When each log grew, noted by the agent of its node.

With these notes logs can be merged in order of time whatever wrote them, and stay plain text. A
line of logs/node-K.stamps is `unixtime name size`: by then, logs/name.log had that size. The log of
one rank may also be copied to the screen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from echelon.launch.plan import NodeSpec
from echelon.runs.run_folder import Run

_LAST_LINE_COUNT = 20
_MAX_READ_BYTES = 1 << 18


class NodeLogs:
    """The logs of one node in one attempt."""

    def __init__(self, run: Run, node: NodeSpec, ranks: list[int], shown_rank: int | None) -> None:
        self._run = run
        self._file = run.get_stamps_file(node.rank)
        batch = [run.job_log_file] if node.rank == 0 else []
        logs = [*batch, run.get_node_log_file(node.rank), *map(run.get_rank_log_file, ranks)]
        # From 0, though a log may be old: what it contains already was written before now.
        self._sizes = dict.fromkeys(logs, 0)
        self._start_sizes = {
            rank: _get_file_size_bytes(run.get_rank_log_file(rank)) for rank in ranks
        }
        self._shown_rank: int | None = None
        self._shown_bytes = 0
        self.show_rank(shown_rank)

    def show_rank(self, rank: int | None) -> None:
        """From now on copy the log of this rank to the screen, if it is one of this node."""
        if rank == self._shown_rank:
            return
        self._print_shown_rank()
        self._shown_rank = rank if rank in self._start_sizes else None
        if rank in self._start_sizes:
            recorded = self._sizes[self._run.get_rank_log_file(rank)]
            self._shown_bytes = max(self._start_sizes[rank], recorded)

    def record_growth(self) -> None:
        """Note which logs have grown. Called many times a second, it reads only file sizes."""
        lines = []
        for log, before in self._sizes.items():
            size = _get_file_size_bytes(log)
            if size > before:
                lines.append(f"{time.time():.3f} {log.stem} {size}\n")
                self._sizes[log] = size
        if lines:
            # The disk may be full.
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        self._print_shown_rank()

    def read_last_lines(self, rank: int) -> str:
        """Return the last lines that a rank wrote in this attempt."""
        return "\n".join(self.read_attempt_log(rank).splitlines()[-_LAST_LINE_COUNT:])

    def read_attempt_log(self, rank: int) -> str:
        """Return what a rank wrote in this attempt, or the end of it where it is long."""
        size = _get_file_size_bytes(self._run.get_rank_log_file(rank))
        return self._read_log_range(rank, max(self._start_sizes[rank], size - _MAX_READ_BYTES))

    def _print_shown_rank(self) -> None:
        """Print what was added to the log of the rank that is shown."""
        rank = self._shown_rank
        if rank is None:
            return
        size = self._sizes[self._run.get_rank_log_file(rank)]
        if size > self._shown_bytes:
            # Of rank 0 only a program's log is shown, which may be piped; others report progress.
            stream = sys.stderr if rank else sys.stdout
            stream.write(self._read_log_range(rank, self._shown_bytes, size))
            stream.flush()
            self._shown_bytes = size

    def _read_log_range(self, rank: int, start: int, end: int | None = None) -> str:
        with contextlib.suppress(OSError), self._run.get_rank_log_file(rank).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode(errors="replace")
        return ""


def _get_file_size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
