"""The history of one metric, read from the metrics.jsonl of a run while it grows."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

_AXIS_KEYS = ("step", "epoch", "samples", "time")
"""Numbers of a line that are not metrics."""


def to_file_key(name: str, is_program: bool) -> str:
    """Return the key of a metric in metrics.jsonl.

    A program writes its own names there. The metric of an experiment is named as trackers name it
    (`eval/rmse`) or as `trainer.best` does (`rmse`): both are `eval_rmse` in the file.
    """
    folder, slash, rest = name.partition("/")
    if is_program or name.startswith("eval_"):
        return name
    if slash and folder == "train":
        return rest
    return f"eval_{rest if slash and folder == 'eval' else name}"


def to_metric_name(key: str) -> str:
    """Return the name by which trackers know a key of metrics.jsonl."""
    return f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"


class MetricHistory:
    """The finite values of one metric so far.

    A run that resumes from a snapshot writes a new, shorter file: then this reads from the start.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._inode, self._offset = -1, 0
        self.values: list[float] = []
        self.reported_keys: set[str] = set()
        """All metrics that were reported."""

    def read(self) -> list[float]:
        """Read what was added since the last call, and return all values."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self.values = status.st_ino, 0, []
            file.seek(self._offset)
            text = file.read()
            whole_lines = text[: text.rfind(b"\n") + 1]  # the last one may be half written
            self._offset += len(whole_lines)
            self._parse_lines(whole_lines.splitlines())
        return self.values

    def _parse_lines(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                for key, value in line.items() if isinstance(line, dict) else ():
                    if isinstance(value, (int, float)) and key not in _AXIS_KEYS:
                        self.reported_keys.add(key)
                        if key == self._key and math.isfinite(value):
                            self.values.append(float(value))
