"""`echelon attach` and `--wait`: a run that goes on elsewhere, as if it had been started here."""

from __future__ import annotations

import re
import sys

from echelon.errors import Exit
from echelon.jobs.follow import BEGIN_WITH, Plain, follow
from echelon.jobs.reading import Line
from echelon.jobs.standing import Standing, last_metrics
from echelon.runs import Run
from echelon.track.screen import Bar
from echelon.track.summary import spoken

_STEP = re.compile(rb"step \d+/\d+  epoch ")
"""What a bar shows better."""


def attach(run: Run, begin_with: int = BEGIN_WITH) -> int:
    """Show what rank 0 says until the run is over; the exit code is the training's."""
    bar = sys.stderr.isatty() and run.config().track.progress in ("auto", "bar")
    printer = Attached(run) if bar else Told(run)
    try:
        standing = follow(run, lambda: _names(run), printer, begin_with, printer.tell)
    except KeyboardInterrupt:
        printer.close()
        hint = f"`echelon attach {spoken(run)}` comes back, `echelon cancel {spoken(run)}` ends it"
        print(f"\ndetached; run {run.name} goes on\n  hint: {hint}", file=sys.stderr)
        return Exit.OK
    printer.close()
    return int(standing.exit or Exit.OK)


def _names(run: Run) -> list[str]:
    """Rank 0's words, of its agent where that has a log: rank 0's are in there."""
    of_rank_0 = "node-0" if run.node_log(0).exists() else "rank-0"
    return [name for name in ("job", of_rank_0) if (run.logs / f"{name}.log").exists()]


class Told(Plain):
    """Beside what was written: how the run stands, whenever that changes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._said = ""

    def tell(self, standing: Standing) -> None:
        who = f"job {standing.job}" if standing.job else f"run {standing.run}"
        said = f"{who}: {standing.state}" + f" ({standing.note})" * bool(standing.note)
        if said != self._said:
            self._said = said
            self.say(said)

    def say(self, text: str) -> None:
        self.pause()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.pause()


class Attached(Told):
    """On a terminal, with a bar as soon as it is known how many steps there will be."""

    whole_lines = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._bar: Bar | None = None

    def tell(self, standing: Standing) -> None:
        super().tell(standing)
        metrics = last_metrics(self.run)
        total = self.run.status().get("total_steps")
        if self._bar is None and metrics and isinstance(total, int):
            self._bar = Bar(total, metrics[0]["step"])
        if self._bar is not None and metrics:
            self._bar.progress(metrics[-1])

    def show(self, line: Line) -> None:
        if not self._bar or not self._bar.show:
            super().show(line)
        elif not _STEP.match(line.text):
            self._bar.show(line.text.decode(errors="replace").rstrip("\n"))

    def say(self, text: str) -> None:
        if not self._bar or not self._bar.show:
            super().say(text)
        else:
            self._bar.show(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        super().close()
