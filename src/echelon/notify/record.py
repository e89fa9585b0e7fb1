"""Which news of a run was sent already: a file in its folder, so that restarts tell nothing
twice."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon.notify.deliver import Delivery
from echelon.utils.locks import FileLock, LocksUnsupportedError


class NewsRecord:
    """Lines of ``news.jsonl``. Each message is claimed before it is sent: a process that is killed
    in between has told nothing, and none is told twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._claimed_here: set[str] = set()

    def claim(self, key: str, event: str, subject: str) -> bool:
        """Return whether nobody has told this yet; then it is the caller's to tell."""
        if key in self._claimed_here:
            return False
        self._claimed_here.add(key)
        with contextlib.suppress(OSError), self._locked():
            if any(line.get("key") == key for line in self.read_lines()):
                return False
            self._append({"key": key, "event": event, "subject": subject})
        return True  # also where nothing can be written: a full disk is worth a message

    def note(self, key: str, deliveries: Sequence[Delivery]) -> None:
        """Write down what became of a message."""
        sent = {each.channel: "sent" if each.is_sent else each.text for each in deliveries}
        with contextlib.suppress(OSError):
            self._append({"of": key, "sent": sent})

    def read_lines(self) -> Iterator[dict[str, Any]]:
        """Yield all lines that can be read."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, RecursionError):
                    parsed = json.loads(line)
                    if isinstance(parsed, dict):
                        yield parsed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._path)
        try:
            lock.acquire()
        except LocksUnsupportedError:
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _append(self, fields: dict[str, Any]) -> None:
        line = {"time": round(time.time(), 3)} | fields
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
