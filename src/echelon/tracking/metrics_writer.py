"""The writer of metrics.jsonl: one JSON object per line, always written. See
`runs.metrics_file`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import IO

from echelon.errors import ExitCode
from echelon.runs.metrics_file import (
    MARK_BYTES,
    MetricsLine,
    hash_mark,
    iterate_metrics,
    read_metrics,
)
from echelon.runs.metrics_summary import MetricsSummary, write_summary
from echelon.runs.run_folder import Run
from echelon.tracking.media_records import remove_media_after
from echelon.utils.files import replace_file

_SUMMARY_INTERVAL_S = 5.0
"""Between two writings of summary.json. Readers add what came later by themselves."""


_UNWRITTEN_BYTES = 1 << 20
"""So much waits in memory while the disk is full: some thousand lines."""


class MetricsFile:
    """Appends lines to metrics.jsonl, and keeps summary.json for lists. A run that resumes from a
    step removes the lines after that step first, because the training will write them again. So it
    does with the evaluation of the step itself, where that will be made again."""

    def __init__(self, run: Run, resumed_step: int, is_evaluation_left: bool = False) -> None:
        self._run = run
        self._summary = MetricsSummary()
        self._last_bytes = b""
        """Those before the position of the summary."""
        path = run.metrics_file
        if path.exists():
            self._truncate_after(path, resumed_step, is_evaluation_left)
        self._file: IO[bytes] = path.open("ab", buffering=_UNWRITTEN_BYTES)
        self._write_summary()

    def read_past_lines(self) -> list[MetricsLine]:
        """Return the lines of earlier starts, for a tracker that has to be brought up to date."""
        return read_metrics(self._run.metrics_file)

    def log(self, line: MetricsLine) -> None:
        """Append a line, which readers see at once. While the disk is full lines wait in memory,
        and those that do not fit there are dropped."""
        text = _encode_line(line)
        try:
            self._file.write(text)
        except OSError:  # a full disk must not end a training; saving a snapshot reports it
            return
        self._count_line(line, text)
        with contextlib.suppress(OSError):  # it stays in the buffer, and is written with the next
            self._file.flush()
        if time.monotonic() >= self._next_summary:
            self._write_summary()

    def close(self, outcome: ExitCode) -> dict[str, str]:
        self._write_summary()
        with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
            self._file.close()
        return {}

    def _truncate_after(self, path: Path, step: int, is_evaluation_left: bool) -> None:
        """Rewrite the file without the lines after a step."""

        def is_kept(line: MetricsLine) -> bool:
            own_step = line.get("step", 0)
            is_repeated = is_evaluation_left and any(key.startswith("eval_") for key in line)
            return own_step < step or (own_step == step and not is_repeated)

        with replace_file(path) as temporary, temporary.open("wb") as file:
            for line in iterate_metrics(path):
                if is_kept(line):
                    text = _encode_line(line)
                    file.write(text)
                    self._count_line(line, text)
        remove_media_after(self._run, step)

    def _count_line(self, line: MetricsLine, text: bytes) -> None:
        self._summary.add(line)
        self._summary.offset += len(text)
        self._last_bytes = (self._last_bytes + text)[-MARK_BYTES:]

    def _write_summary(self) -> None:
        """Write the summary, unless a full disk has not taken all lines yet: its position would be
        beyond the file. Readers then go on from the summary before."""
        self._next_summary = time.monotonic() + _SUMMARY_INTERVAL_S
        if os.fstat(self._file.fileno()).st_size == self._summary.offset:
            self._summary.mark = hash_mark(self._last_bytes)
            write_summary(self._run, self._summary, by_training=True)


def _encode_line(line: MetricsLine) -> bytes:
    return (json.dumps(line) + "\n").encode()
