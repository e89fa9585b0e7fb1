"""The only reader of ``metrics.jsonl``: whole, its ends, one metric, or what a training appends.

Each line is one JSON object. A killed writer leaves half a line at the end, and a reader of the
end may see half a line at the beginning: whatever is not a JSON object is skipped. The writer is
`tracking.metrics_writer`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable
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

_HEAD_BYTES = 4096
_TAIL_BYTES = 8 * 1024
"""Enough lines to compute the present speed."""
_MAX_FLOAT = sys.float_info.max


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return all lines of a metrics file; a missing file has none."""
    content = path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""
    return _parse_lines(content.splitlines())


def read_first_metrics(path: Path) -> MetricsLine | None:
    """Return the first line; None if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            return _parse_line(file.readline(_HEAD_BYTES))
    except OSError:
        return None


def read_recent_metrics(path: Path) -> list[MetricsLine]:
    """Return the last lines that have a step and a time, without reading the lines before them.

    An unreadable file has none.
    """
    lines = _parse_lines(_read_tail(path).splitlines())
    return [line for line in lines if all(is_number(line.get(k)) for k in ("step", "time"))]


def scan_metric(path: Path, key: str) -> list[float]:
    """Return the finite values of one metric; none if the file cannot be read. The lines are
    searched as text, which is ten times as fast as parsing them."""
    number = re.compile(rb'"' + re.escape(key).encode() + rb'": (-?[0-9.eE+-]+)')
    try:
        found = [float(text) for text in number.findall(path.read_bytes())]
    except (OSError, ValueError):
        return []
    return [value for value in found if math.isfinite(value)]


class MetricsFollower:
    """Reads a metrics file while it grows.

    A run that resumes from a snapshot writes a new, shorter file: then this reads from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = -1, 0

    def read_new_lines(self) -> tuple[list[MetricsLine], bool]:
        """Return the whole lines that were added since the last call, and whether the file began
        anew, so that earlier lines no longer count."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            is_new = status.st_ino != self._inode or status.st_size < self._offset
            if is_new:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            text = file.read()
            whole_lines = text[: text.rfind(b"\n") + 1]  # the last one may be half written
            self._offset += len(whole_lines)
            return _parse_lines(whole_lines.splitlines()), is_new
        return [], False


def _read_tail(path: Path) -> bytes:
    """Return the last few kilobytes of a file; its first line may be cut. Unreadable: empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _parse_lines(texts: Iterable[str | bytes]) -> list[MetricsLine]:
    return [line for text in texts if (line := _parse_line(text)) is not None]


def _parse_line(text: str | bytes) -> MetricsLine | None:
    """Return the JSON object of a line, or None."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a number that can be drawn.

    Excludes true and false, integers beyond the range of a float, and the NaN and Infinity that
    Python's JSON reads and writes.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT
