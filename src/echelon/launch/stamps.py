"""When each log grew, noted by the agents, so that logs can be merged in order afterwards whatever
wrote them; and, for a program that is not ours, rank 0's words on the screen.

A line of logs/node-K.stamps is `unixtime name size`: by then, logs/name.log had that size.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from echelon.launch.plan import Node
from echelon.runs import Run

_LAST_LINES = 20
_MUCH = 1 << 18


class Stamps:
    def __init__(self, run: Run, node: Node, ranks: list[int], shown: bool) -> None:
        self._run = run
        self._file = run.stamps_file(node.rank)
        batch = [run.job_log] if node.rank == 0 else []
        logs = [*batch, run.node_log(node.rank), *map(run.log_file, ranks)]
        # From nothing, though a log may be old: what it says already was said before now.
        self._sizes = dict.fromkeys(logs, 0)
        self._begun = {rank: _size(run.log_file(rank)) for rank in ranks}
        self._seen = self._begun.get(0, 0)
        self._shown = shown

    def mark(self) -> None:
        """Note what has grown; a few file sizes, many times a second."""
        lines = []
        for log, before in self._sizes.items():
            size = _size(log)
            if size > before:
                lines.append(f"{time.time():.3f} {log.stem} {size}\n")
                self._sizes[log] = size
        if lines:
            # The disk may be full.
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        if self._shown and 0 in self._begun:
            self._show()

    def last_words(self, rank: int) -> str:
        """The end of what a rank said in this attempt."""
        return "\n".join(self.words(rank).splitlines()[-_LAST_LINES:])

    def words(self, rank: int) -> str:
        """All that a rank said in this attempt, or the end of it where it is much."""
        size = _size(self._run.log_file(rank))
        return self._read(rank, max(self._begun[rank], size - _MUCH))

    def _show(self) -> None:
        size = self._sizes[self._run.log_file(0)]
        if size > self._seen:
            sys.stdout.write(self._read(0, self._seen, size))
            sys.stdout.flush()
            self._seen = size

    def _read(self, rank: int, start: int, end: int | None = None) -> str:
        with contextlib.suppress(OSError), self._run.log_file(rank).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode(errors="replace")
        return ""


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
