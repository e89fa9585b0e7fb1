"""The history of one metric, read from a run's metrics.jsonl while it grows."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

_AXIS_KEYS = ("step", "epoch", "samples", "time")


def to_file_key(name: str, program: bool) -> str:
    """What a metric is called in metrics.jsonl. A program's is called as the program calls it; an
    experiment's is given as trackers have it (`eval/rmse`), or `trainer.best` (`rmse`)."""
    folder, slash, rest = name.partition("/")
    if program or name.startswith("eval_"):
        return name
    if slash and folder == "train":
        return rest
    return f"eval_{rest if slash and folder == 'eval' else name}"


def to_metric_name(key: str) -> str:
    """The other way round."""
    return f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"


class MetricHistory:
    """Of one metric. A run that goes on from a snapshot writes its file anew, shorter; so does this
    read it then."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._inode, self._offset = -1, 0
        self.values: list[float] = []
        self.reported_keys: set[str] = set()
        """All that was reported."""

    def read(self) -> list[float]:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self.values = status.st_ino, 0, []
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._parse_lines(whole.splitlines())
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
