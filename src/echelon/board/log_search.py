"""Searches in the logs of a run that go on while the logs grow, each part in a child process.

The child (`log_search_process.py`) is ended by the kernel when its time is over, so a regular
expression that never ends costs a process and not the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.board.request import NotFoundError, RequestError

MAX_MATCHES = 10_000
_TIME_LIMIT_S = 20.0
_MAX_PATTERN = 1000
_MAX_FILES = 200
"""In one child: each is an open file."""
_PROGRAM = Path(__file__).with_name("log_search_process.py")


class SearchQuery(NamedTuple):
    """What is searched."""

    pattern: str
    is_regex: bool
    keeps_case: bool


class WholeLines(NamedTuple):
    """The whole lines of a log."""

    open: Callable[[], int]
    """Returns a handle."""
    end: int
    """In bytes."""
    line_count: int


class LogSearch:
    """One search and what it has found so far."""

    def __init__(self, query: SearchQuery) -> None:
        if len(query.pattern) > _MAX_PATTERN or "\n" in query.pattern:
            raise RequestError(f"a search is one line of at most {_MAX_PATTERN} characters")
        self._query = query
        self._matches: list[int] = []
        self._count = 0
        self._fault = ""
        self._searched: dict[int, tuple[int, int]] = {}
        """For each log the bytes and the lines that were searched."""
        self._running = threading.Lock()
        self._done = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def go_on(
        self,
        logs: Sequence[WholeLines],
        find_number: Callable[[int, int], int],
        wait_s: float,
    ) -> None:
        """Search what is new in the background, and wait so long for it. ``find_number`` says the
        number among all lines of a line of one log."""
        new = [i for i, log in enumerate(logs) if log.end > self._searched.get(i, (0, 0))[0]]
        if new and not self._fault and self._running.acquire(blocking=False):
            self._done.clear()
            arguments = (logs, new, find_number)
            threading.Thread(target=self._search_and_release, args=arguments, daemon=True).start()
        elif not self._running.locked():
            return
        self._done.wait(wait_s)

    def to_dict(self) -> dict[str, Any]:
        """Return what a page is told of the search."""
        data: dict[str, Any] = {
            "matches": self._matches[:MAX_MATCHES],
            "match_count": max(self._count, len(self._matches)),
            "searching": self._running.locked(),
        }
        return data | ({"search_fault": self._fault} if self._fault else {})

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def _search_and_release(
        self, logs: Sequence[WholeLines], new: Sequence[int], find_number: Callable[[int, int], int]
    ) -> None:
        try:
            for start in range(0, len(new), _MAX_FILES):
                if not self._fault and not self._is_closed:
                    self._search_logs(logs, new[start : start + _MAX_FILES], find_number)
        finally:
            self._running.release()
            self._done.set()

    def _search_logs(
        self,
        logs: Sequence[WholeLines],
        some: Sequence[int],
        find_number: Callable[[int, int], int],
    ) -> None:
        handles: list[int] = []
        files, indices = [], []
        try:
            for index in some:
                start, line = self._searched.get(index, (0, 0))
                try:
                    handles.append(logs[index].open())
                except NotFoundError:
                    continue
                indices.append(index)
                files.append(
                    {"handle": handles[-1], "start": start, "end": logs[index].end, "line": line}
                )
            self._run_child(files, indices, handles, find_number)
        finally:
            for handle in handles:
                os.close(handle)
        self._searched |= {i: (logs[i].end, logs[i].line_count) for i in some}

    def _run_child(
        self,
        files: Sequence[dict[str, int]],
        indices: Sequence[int],
        handles: Sequence[int],
        find_number: Callable[[int, int], int],
    ) -> None:
        request = {
            "pattern": self._query.pattern,
            "is_regex": self._query.is_regex,
            "keeps_case": self._query.keeps_case,
            "limit": max(0, MAX_MATCHES - len(self._matches)),
            "time_limit_s": _TIME_LIMIT_S,
            "files": list(files),
        }
        command = [sys.executable, "-I", "-S", str(_PROGRAM)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            pass_fds=handles,
        ) as process:
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.close()
            except BrokenPipeError:
                pass
            for text in process.stdout:
                self._take_answer(text, indices, find_number)
        self._process = None
        if process.returncode == -signal.SIGALRM:
            self._fault = (
                f"the search took longer than {_TIME_LIMIT_S:g} s and was ended; "
                "what it had found is shown"
            )
        elif process.returncode and not self._is_closed and not self._fault:
            self._fault = "the search needs too much memory"

    def _take_answer(
        self, text: str, indices: Sequence[int], find_number: Callable[[int, int], int]
    ) -> None:
        word, _, value = text.rstrip("\n").partition(" ")
        if word == "fault":
            self._fault = f"not a regular expression: {value}"
        elif word == "count":
            self._count += int(value)
        elif value:
            insort(self._matches, find_number(indices[int(word)], int(value)))
