"""A tracker that is slow, fails or was killed: the training goes on, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine
from echelon.tracking.background import (
    BackgroundTracker,
    PrintMessage,
    TrackerProgress,
    summarize_error,
)
from echelon.tracking.tracker import prefix_metric_names, select_axes


class Kept:
    """A sink in memory that fails, or waits, as it is told."""

    def __init__(self, settles_s: float = 0.0, fails_at: int = -1) -> None:
        self.settles_s = settles_s
        self.fails_at = fails_at
        self.rows: list[tuple[int, int]] = []
        self.ended: list[ExitCode] = []

    def open(
        self, past: Sequence[MetricsLine], before: TrackerProgress, say: PrintMessage
    ) -> tuple[Kept, Sequence[MetricsLine]]:
        self.before = before
        return self, past[before.lines :]

    def put(self, line: MetricsLine, row: int) -> None:
        if line["step"] == self.fails_at:
            raise OSError(28, "No space left on device")
        self.rows.append((line["step"], row))

    def flush(self) -> None: ...

    def close(self, outcome: ExitCode) -> None:
        self.ended.append(outcome)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def lines(*steps: int) -> list[MetricsLine]:
    return [{"step": step, "loss": 0.5} for step in steps]


def apart(
    sink: Kept, past: Sequence[MetricsLine], folder: Path, patience_s: float = 300.0
) -> BackgroundTracker:
    mark = folder / "mark"
    return BackgroundTracker(
        "kept",
        sink.open,
        past,
        mark,
        close_timeout_s=patience_s,
        get_summary_rows=lambda: {"a": "b"},
    )


def test_lines_arrive_in_order_and_the_end_is_told(tmp_path: Path) -> None:
    sink = Kept()
    tracker = apart(sink, [], tmp_path)
    for line in lines(1, 2, 3):
        tracker.log(line)
    assert tracker.close(ExitCode.PREEMPTED) == {"a": "b"}
    assert sink.rows == [(1, 0), (2, 1), (3, 2)]
    assert sink.ended == [ExitCode.PREEMPTED]


def test_after_a_resume_only_what_is_new_is_put_in_and_rows_go_on(tmp_path: Path) -> None:
    first = apart(Kept(), [], tmp_path)
    for line in lines(1, 2, 3, 4):
        first.log(line)
    first.close(ExitCode.OK)
    sink = Kept()
    second = apart(sink, lines(1, 2), tmp_path)  # a snapshot of step 2
    second.log(lines(3)[0])
    second.close(ExitCode.OK)
    assert sink.rows == [(3, 4)]


def test_one_that_was_chosen_late_is_given_all_there_is(tmp_path: Path) -> None:
    sink = Kept()
    apart(sink, lines(1, 2, 3), tmp_path).close(ExitCode.OK)
    assert sink.steps == [1, 2, 3]


def test_what_had_not_settled_when_it_was_killed_is_given_again(tmp_path: Path) -> None:
    killed = Kept(settles_s=1e9)
    tracker = apart(killed, lines(1), tmp_path)
    tracker.log(lines(2)[0])
    killed.fails_at = 3  # it ends here without being closed, as by a kill
    tracker.log(lines(3)[0])
    tracker.close(ExitCode.OK)
    sink = Kept()
    apart(sink, lines(1, 2, 3), tmp_path).close(ExitCode.OK)
    assert sink.steps == [1, 2, 3]
    assert min(row for _, row in sink.rows) > max(row for _, row in killed.rows)


def test_a_failure_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = apart(Kept(fails_at=2), [], tmp_path)
    for line in lines(1, 2, 3, 4):
        tracker.log(line)
    tracker.close(ExitCode.OK)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: kept: [Errno 28] No space left on device; the training goes")


def test_one_that_cannot_be_opened_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> tuple[Kept, Sequence[MetricsLine]]:
        raise ModuleNotFoundError("No module named 'kept'")

    tracker = BackgroundTracker(
        "kept", refuse, [], tmp_path / "mark", close_timeout_s=300, get_summary_rows=dict
    )
    tracker.log(lines(1)[0])
    tracker.close(ExitCode.OK)
    assert capsys.readouterr().err.count("warning: kept: No module named 'kept'") == 1


def test_one_that_never_ends_is_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_go = threading.Event()

    class Stuck(Kept):
        def close(self, outcome: ExitCode) -> None:
            let_go.wait()

    tracker = BackgroundTracker(
        "kept",
        Stuck().open,
        [],
        tmp_path / "mark",
        close_timeout_s=0.05,
        get_summary_rows=dict,
        abandon=let_go.set,
    )
    tracker.log(lines(1)[0])
    tracker.close(ExitCode.OK)
    assert "did not end within 0.05 s" in capsys.readouterr().err
    assert let_go.is_set()


def test_a_mark_that_a_crash_left_broken_means_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "mark").write_bytes(bytes(64))
    sink = Kept()
    apart(sink, lines(1), tmp_path).close(ExitCode.OK)
    assert sink.steps == [1]


def test_names_are_the_same_on_every_tracker() -> None:
    line = {"step": 3, "epoch": 1, "samples": 96, "loss": 1.0, "lr": 0.1, "time": 5.0}
    assert select_axes(line) == {"step": 3, "epoch": 1, "samples": 96}
    assert prefix_metric_names(line) == {"train/loss": 1.0, "train/lr": 0.1}
    assert prefix_metric_names({"step": 3, "epoch": 1, "eval_mae": 0.5}) == {"eval/mae": 0.5}


def test_an_error_of_many_lines_is_one() -> None:
    assert summarize_error(ValueError("first.\nsecond")) == "first"
    assert summarize_error(ValueError()) == "ValueError"
    assert len(summarize_error(ValueError("x" * 500))) == 160
