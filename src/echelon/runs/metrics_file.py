"""``metrics.jsonl`` as others read it: whole, or only its end while a training appends to it.

Each line is one JSON object. A killed writer leaves half a line at the end, and a reader of the
end may see half a line at the beginning: whatever is not a JSON object is skipped. The writer is
`tracking.metrics_writer`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TypeGuard

MetricsLine = dict[str, Any]
"""One line: `step`, `epoch`, and what was measured there."""

SPEED_METRICS = (
    *("samples_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms", "optimizer_ms"),
    *("mfu", "memory_gb", "slowest_rank", "slowest_x"),
)
"""How fast a run was, not how good: they differ even between two runs of the same settings. A line
has only those that were measured since the line before."""

_TAIL_BYTES = 8 * 1024
"""Enough lines to compute the present speed."""
_MAX_FLOAT = sys.float_info.max


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return all lines of a metrics file; a missing file has none."""
    lines = []
    content = path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""
    for text in content.splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def read_last_metrics(path: Path) -> list[MetricsLine]:
    """Return the last lines that have a step and a time, without reading the lines before them.

    An unreadable file has none.
    """
    lines = []
    for text in read_tail(path).splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and all(is_number(line.get(k)) for k in ("step", "time")):
                lines.append(line)
    return lines


def read_tail(path: Path) -> bytes:
    """Return the last few kilobytes of a file; its first line may be cut. Unreadable: empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number that can be drawn.

    Excludes true and false, integers beyond the range of a float, and the NaN and Infinity that
    Python's JSON reads and writes.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT
