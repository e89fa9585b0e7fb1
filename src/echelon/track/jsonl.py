"""metrics.jsonl: one JSON object per line, always written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import IO

from echelon.errors import Exit
from echelon.track.lines import Line
from echelon.utils.files import write_text_atomically


class JsonLines:
    """Appends lines. A run that goes on from step s forgets the lines after s: they come again."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.kept = _keep_until(path, resumed_step)
        self._file: IO[str] = path.open("a", buffering=1, encoding="utf-8")

    def log(self, line: Line) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError:  # a full disk must not end a training; the snapshot's error says it
            return

    def close(self, outcome: Exit) -> dict[str, str]:
        with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
            self._file.close()
        return {}


def read(path: Path) -> list[Line]:
    """The whole lines; a process killed while writing leaves half a line."""
    lines = []
    whole = path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""
    for text in whole.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _keep_until(path: Path, step: int) -> list[Line]:
    kept = [line for line in read(path) if line.get("step", 0) <= step]
    if path.exists():
        write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
