"""The writer of metrics.jsonl: one JSON object per line, always written. See
`runs.metrics_file`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import IO

from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine, read_metrics
from echelon.utils.files import write_text_atomically


class MetricsFile:
    """Appends lines to metrics.jsonl. A run that resumes from a step removes the lines after that
    step first, because the training will write them again."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.past_lines = _truncate_after(path, resumed_step)
        self._file: IO[str] = path.open("a", buffering=1, encoding="utf-8")

    def log(self, line: MetricsLine) -> None:
        """Append a line, which readers see at once. A line that cannot be written is dropped."""
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError:  # a full disk must not end a training; saving a snapshot reports it
            return

    def close(self, outcome: ExitCode) -> dict[str, str]:
        with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
            self._file.close()
        return {}


def _truncate_after(path: Path, step: int) -> list[MetricsLine]:
    """Rewrite the file without the lines after a step, and return the lines that stay."""
    kept = [line for line in read_metrics(path) if line.get("step", 0) <= step]
    if path.exists():
        write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
