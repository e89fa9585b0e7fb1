"""Samples that cannot be read or decoded: named by file and number, or skipped and listed.

A sample that is skipped is replaced by the next readable one in the order of the data. So batches
keep their sizes, and which sample comes where depends on the data alone: not on the number of
processes, nor on where a run was resumed. A replacement draws the random numbers of the sample that
it replaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from echelon.data.formats.reader import BadSampleError
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.failure import find_last_user_line
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_count

_MAX_WARNINGS = 10
"""Lines of a process about samples that it skips; the file lists all."""


class BadSample(NamedTuple):
    """A sample that was skipped."""

    row: int
    """Its number in the Dataset."""
    place: str
    why: str
    instead: int
    """The number of the one that took its place."""


def describe_error(error: Exception) -> str:
    """Return why a sample cannot be read, with the line of the user's code if there is one."""
    if isinstance(error, BadSampleError):
        return error.why
    line = find_last_user_line(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" + (f" ({line})" if line else "")


def make_bad_sample_fault(data_name: str, place: str, why: str) -> Fault:
    """Return the fault of a sample that ends a training."""
    return Fault(
        f"{data_name} has a sample that cannot be read: {place}: {why}",
        "repair it or leave it out of the data, or skip such samples: trainer.bad_samples=skip",
    )


def make_too_many_fault(data_name: str, max_count: int, last: BadSample) -> Fault:
    """Return the fault of more samples than may be skipped."""
    return Fault(
        f"trainer.max_bad_samples={max_count}, but more samples of {data_name} cannot be read, the "
        f"last of them {last.place}: {last.why}",
        "see which in bad_samples.jsonl in the run's folder; repair the data, or allow more",
    )


class BadSampleList:
    """The samples that a run has skipped, each once, in a file that its processes share.

    Processes on nodes that do not share the run's folder count for themselves.
    """

    def __init__(self, file: Path, max_count: int) -> None:
        self.max_count = max_count
        self._file = file
        self._known: set[tuple[str, int]] = set()
        self._warning_count = 0

    def add(self, data_name: str, samples: Iterable[BadSample]) -> None:
        """List samples that are not there yet, and raise where there are too many of them."""
        by_row = {bad.row: bad for bad in samples if (data_name, bad.row) not in self._known}
        new = list(by_row.values())
        if not new:
            return
        unlisted = new
        try:
            unlisted = self._add_to_file(data_name, new)
        except OSError as error:  # a full disk must not end a training over this
            print(
                f"warning: {self._file} was not written: {format_os_error_reason(error)}",
                file=sys.stderr,
            )
        self._known |= {(data_name, bad.row) for bad in new}
        for bad in unlisted:
            self._warn(data_name, bad)
        if len(self._known) > self.max_count:
            fault = make_too_many_fault(data_name, self.max_count, new[-1])
            raise EchelonError(fault, exit=ExitCode.FAILED)

    def _add_to_file(self, data_name: str, new: list[BadSample]) -> list[BadSample]:
        """Append and return the samples that no process has listed. All that are listed are known
        afterwards."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(LocksUnsupportedError):
                stack.enter_context(FileLock(self._file))
            text = self._file.read_bytes() if self._file.exists() else b""
            self._known |= set(_parse_listed(text))
            unlisted = [bad for bad in new if (data_name, bad.row) not in self._known]
            lines = [
                {"data": data_name, **bad._asdict(), "time": round(time.time(), 3)}
                for bad in unlisted
            ]
            added = "".join(json.dumps(line) + "\n" for line in lines).encode()
            if text and not text.endswith(b"\n"):  # a process was killed while it wrote
                added = b"\n" + added
            if lines:
                with self._file.open("ab", buffering=0) as file:
                    file.write(added)
                    os.fsync(file.fileno())
        return unlisted

    def _warn(self, data_name: str, bad: BadSample) -> None:
        self._warning_count += 1
        if self._warning_count <= _MAX_WARNINGS:
            more = "; more of them are only listed" if self._warning_count == _MAX_WARNINGS else ""
            print(
                f"warning: skipped a sample of {data_name}: {bad.place}: {bad.why}; sample "
                f"{bad.instead} takes its place ({format_count(len(self._known), 'bad sample')}, "
                f"see {self._file.name}){more}",
                file=sys.stderr,
            )


def _parse_listed(text: bytes) -> Iterable[tuple[str, int]]:
    """Yield what the file lists; a line that was cut short counts nothing."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            listed = json.loads(line)
            yield str(listed["data"]), int(listed["row"])
