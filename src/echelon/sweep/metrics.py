"""The history of one metric, read from a run's metrics.jsonl while it grows."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

_AXES = ("step", "epoch", "samples", "time")


def spellings(name: str) -> list[str]:
    """What a metric may be called in metrics.jsonl: as written, as trackers have it (`eval/rmse`),
    or as `trainer.best` has it (`rmse`: what is evaluated, before what is trained on)."""
    folder, slash, rest = name.partition("/")
    if slash and folder == "eval":
        return [name, f"eval_{rest}"]
    if slash and folder == "train":
        return [name, rest]
    return [f"eval_{name}", name]


class History:
    """Of one metric. A run that goes on from a snapshot writes its file anew, shorter; so does this
    read it then."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._names = path, spellings(name)
        self._inode, self._offset = -1, 0
        self._by_name: dict[str, list[float]] = {}
        self.seen: set[str] = set()
        """All that was reported."""

    @property
    def values(self) -> list[float]:
        return next((self._by_name[n] for n in self._names if n in self._by_name), [])

    def read(self) -> list[float]:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._by_name = status.st_ino, 0, {}
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._take(whole.splitlines())
        return self.values

    def _take(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                for key, value in line.items() if isinstance(line, dict) else ():
                    if isinstance(value, (int, float)) and key not in _AXES:
                        self.seen.add(key)
                        if key in self._names and math.isfinite(value):
                            self._by_name.setdefault(key, []).append(float(value))
