"""What a person sees of a running training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from echelon.tracking.tracker import format_speed

_LINE_EVERY_S = 2.0
_DRAW_EVERY_S = 0.1
_MIN_BAR_WIDTH = 8
_REMAINING_TIME = "0:00:00"
"""What the remaining time may take."""


def create_progress_display(kind: str, total_steps: int, step: int) -> TrainingDisplay:
    """Return the display of a kind: `bar`, `lines`, `none`, or `auto`, which is a bar on a
    terminal."""
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "lines"
    displays: dict[str, type[TrainingDisplay]] = {
        "bar": ProgressBar,
        "lines": ProgressLines,
        "none": TrainingDisplay,
    }
    return displays[kind](total_steps, step)


class TrainingDisplay:
    """Shows nothing; what the others are made from."""

    draw_every_s = float("inf")
    show: Callable[[str], None] | None = None
    """Puts a line above what is drawn, where something is."""

    def __init__(self, total_steps: int = 0, step: int = 0) -> None:
        self.total = total_steps
        self.next_draw = 0.0
        self.latest: dict[str, Any] = {}
        self._shown = "loss"

    def update_progress(self, line: dict[str, Any], shown: str = "loss") -> None:
        """Take a line of training metrics, and draw if the last drawing is long enough ago.

        Values that this line lacks are drawn as an earlier line had them. `shown` is the number
        that is drawn: the loss, or the first of several.
        """
        self._shown = shown
        self.latest.update(line)
        now = time.monotonic()
        if now >= self.next_draw:
            self.next_draw = now + self.draw_every_s
            self.draw(self.latest)

    def draw(self, line: dict[str, Any]) -> None:
        """Show these values now."""

    def format_shown(self, line: dict[str, Any]) -> str:
        """Return the number that is drawn, with its name."""
        return f"{self._shown} {line[self._shown]:.5g}"

    def close(self) -> None:
        """Show the last values, and leave the terminal to others."""


def join_texts_that_fit(texts: list[str], room: int) -> str:
    """Return as many of the texts as fit the width."""
    shown = ""
    for text in texts:
        longer = f"{shown}  {text}" if shown else text
        if len(longer) > room:
            break
        shown = longer
    return shown


class ProgressLines(TrainingDisplay):
    """Prints a line at most every two seconds."""

    draw_every_s = _LINE_EVERY_S

    def draw(self, line: dict[str, Any]) -> None:
        step = f"step {line['step']}/{self.total}"
        print(
            step,
            f"epoch {line['epoch']}",
            self.format_shown(line),
            *format_speed(line),
            sep="  ",
            file=sys.stderr,
        )


class ProgressBar(TrainingDisplay):
    """A bar that is drawn by the training itself, at most ten times a second."""

    draw_every_s = _DRAW_EVERY_S

    def __init__(self, total_steps: int, step: int) -> None:
        super().__init__(total_steps, step)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("[cyan]{task.fields[loss]}"),
            TextColumn("[dim]{task.fields[pace]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=sys.__stderr__),
            redirect_stdout=False,  # train.output brings what is printed to `show`
            redirect_stderr=False,
            auto_refresh=False,  # drawn by us: a thread would wake up beside every training step
        )
        self._task = self._bar.add_task(
            "", total=total_steps, completed=step, epoch="…", loss="", pace=""
        )
        self._bar.start()
        self.show = self._print_above_bar

    def draw(self, line: dict[str, Any]) -> None:
        said = [
            f"epoch {line['epoch']}",
            f"{line['step']}/{self.total}",
            self.format_shown(line),
            _REMAINING_TIME,
        ]
        room = self._bar.console.width - _MIN_BAR_WIDTH - sum(len(text) + 1 for text in said)
        self._bar.update(
            self._task,
            completed=line["step"],
            epoch=line["epoch"],
            loss=self.format_shown(line),
            pace=join_texts_that_fit(format_speed(line), room),
        )
        self._bar.refresh()

    def _print_above_bar(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        if self.latest:
            self.draw(self.latest)
        self._bar.stop()
