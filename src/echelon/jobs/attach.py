"""`echelon attach` and `--wait`: show a run on other machines or in the background as if it had
been started here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.jobs.follow import INITIAL_LINES, PlainPrinter, follow_run
from echelon.jobs.log_reader import LogLine
from echelon.notify.follow import FollowedNews
from echelon.runs.find import find_run
from echelon.runs.metrics_file import read_recent_metrics
from echelon.runs.run_folder import Run
from echelon.runs.status import RunStatus
from echelon.tracking.progress import ProgressBar
from echelon.tracking.summary import format_run_argument

_STEP_LINE = re.compile(rb"step \d+/\d+  epoch ")
"""A line of progress in a log. It is left out where a progress bar shows the same."""


def attach_run(run: Run, initial_lines: int = INITIAL_LINES) -> int:
    """Show the output of rank 0 until the run is over, and return the exit code of the training.

    Ctrl-C detaches and returns 0; the run continues.
    """
    has_bar = sys.stderr.isatty() and _wants_bar(run)
    printer = ProgressBarPrinter(run) if has_bar else StatusPrinter(run)
    try:
        status = follow_run(
            run, lambda: _select_rank_0_logs(run), printer, initial_lines, printer.print_status
        )
    except KeyboardInterrupt:
        printer.close()
        name = format_run_argument(run)
        hint = f"`echelon attach {name}` comes back, `echelon cancel {name}` ends it"
        print(f"\ndetached; run {run.name} goes on\n  hint: {hint}", file=sys.stderr)
        return ExitCode.OK
    printer.close()
    return int(status.exit or ExitCode.OK)


def _wants_bar(run: Run) -> bool:
    return run.read_config(runs_code=False).track.progress in ("auto", "bar")


def attach_or_print_hint(config: Config, wait: bool) -> int:
    """After a run was queued: print how to follow it or, if asked to wait, follow it to its end.

    Returns the exit code of the training if it was waited for, else 0.
    """
    run = find_run(str(config.run.name), config.run.dir)
    if wait:
        return attach_run(run, initial_lines=0)
    is_default = run.folder.parent == Path("runs").absolute()
    dir_option = "" if is_default else f" --dir {config.run.dir}"
    print(f"  follow it  echelon logs {run.name} -f{dir_option}")
    print(f"  all runs   echelon jobs{dir_option}")
    return ExitCode.OK


def _select_rank_0_logs(run: Run) -> list[str]:
    """Return the logs to show: the batch script's and rank 0's. Where the agent of node 0 has a
    log, it is shown instead, because it contains rank 0's output."""
    of_rank_0 = "node-0" if run.get_node_log_file(0).exists() else "rank-0"
    return [name for name in ("job", of_rank_0) if (run.logs_folder / f"{name}.log").exists()]


class StatusPrinter(PlainPrinter):
    """Prints the log as it is and, on stderr, every change of the run's status."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._last_message = ""
        self._news = FollowedNews(run)

    def print_status(self, status: RunStatus) -> None:
        """Print the status if its text differs from the last one; it is called with every poll."""
        self._news.look(status)
        who = f"job {status.job}" if status.job else f"run {status.run}"
        message = f"{who}: {status.state}" + f" ({status.note})" * bool(status.note)
        if message != self._last_message:
            self._last_message = message
            self.print_message(message)

    def print_message(self, text: str) -> None:
        """Print a line on stderr, after what was written to stdout, so that both stay in order."""
        self.flush()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.flush()


class ProgressBarPrinter(StatusPrinter):
    """On a terminal: shows a progress bar as soon as the number of steps is known."""

    whole_lines = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._bar: ProgressBar | None = None

    def print_status(self, status: RunStatus) -> None:
        """Print a changed status, and advance the bar to the newest line of metrics.jsonl.

        The bar is created late: the number of steps is not known before the workers have started.
        """
        super().print_status(status)
        metrics = read_recent_metrics(self.run.metrics_file)
        total = self.run.read_status_file().get("total_steps")
        if self._bar is None and metrics and isinstance(total, int):
            self._bar = ProgressBar(total, metrics[0]["step"])
        if self._bar is not None and metrics:
            self._bar.update_progress(metrics[-1])

    def print_log_line(self, line: LogLine) -> None:
        """Print a line of the log above the bar, except lines of progress, which the bar shows."""
        if not self._bar or not self._bar.show:
            super().print_log_line(line)
        elif not _STEP_LINE.match(line.text):
            self._bar.show(line.text.decode(errors="replace").rstrip("\n"))

    def print_message(self, text: str) -> None:
        if not self._bar or not self._bar.show:
            super().print_message(text)
        else:
            self._bar.show(text)

    def close(self) -> None:
        """Draw the bar a last time, and leave the terminal to others."""
        if self._bar is not None:
            self._bar.close()
        super().close()
