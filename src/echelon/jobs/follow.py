"""What a run says from now on, over all its restarts and requeues, until it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from echelon.jobs.reading import Line, Log, merged
from echelon.jobs.standing import Standing, stand_of
from echelon.launch.process import is_alive
from echelon.runs import Run

BEGIN_WITH = 20
_POLL_S = 0.2
_LOOK_S = 0.5
"""Between two looks at how the run stands."""
_ASK_S = 3.0
"""The same where Slurm is asked, whose controller has others to answer."""
_SURE = 3
"""So many looks in a row at a run that seems to be gone: files of other machines come late."""
_LAST_WORDS_S = 1.0
"""A run says some more after it has noted how it ended."""
_CLOSING_S = 30.0
"""So long its process is waited for then: trackers take their time to close."""


class Printer(Protocol):
    whole_lines: bool

    def show(self, line: Line) -> None: ...

    def pause(self) -> None:
        """For now nothing more is coming."""


class Plain:
    """As it was written, progress bars included."""

    whole_lines = False

    def show(self, line: Line) -> None:
        sys.stdout.buffer.write(line.text)

    def pause(self) -> None:
        sys.stdout.buffer.flush()


def follow(
    run: Run,
    names: Callable[[], Sequence[str]],
    printer: Printer,
    begin_with: int,
    tell: Callable[[Standing], None] = lambda standing: None,
) -> Standing:
    """Show the logs of these names, which may come into being later; `tell` hears of every look."""
    logs = {name: Log(run, name) for name in names()}
    for line in merged(run, list(logs.values()), begin_with, rest=not printer.whole_lines):
        printer.show(line)
    standing = None
    for standing in _looks(run):
        tell(standing)
        for name in names():
            log = logs.setdefault(name, Log(run, name))
            for text in log.lines() if printer.whole_lines else log.blocks():
                printer.show(Line(time.time(), name, text))
        printer.pause()
    for name in names():
        for text in logs.setdefault(name, Log(run, name)).lines(rest=True):
            printer.show(Line(time.time(), name, text))
    printer.pause()
    assert standing is not None
    return standing


def _looks(run: Run) -> Iterator[Standing]:
    """How it stands, again and again, until it is over."""
    gone = 0
    while True:
        standing = stand_of(run)
        gone = gone + 1 if standing.state in ("lost", "unknown") else 0
        over = not standing.active and gone in (0, _SURE)
        wait_s = _LAST_WORDS_S if over else _ASK_S if standing.job else _LOOK_S
        until = time.monotonic() + wait_s
        looking = True
        while looking:
            yield standing
            time.sleep(_POLL_S)
            looking = time.monotonic() < until and (over or not run.exit_file.exists())
            looking = looking or (over and _is_closing(run))
        if over:
            return


def _is_closing(run: Run) -> bool:
    """Where that can be known: its process is of this machine."""
    status = run.status()
    ended = status.get("updated")
    recent = isinstance(ended, (int, float)) and time.time() - ended < _CLOSING_S
    return recent and bool(is_alive(status.get("process")))
