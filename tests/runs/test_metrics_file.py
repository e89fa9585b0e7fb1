"""metrics.jsonl has one reader, whole or in part, while it is written or after a kill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import echelon
from echelon.runs.metrics_file import (
    MetricsFollower,
    MetricsLine,
    read_first_metrics,
    read_metrics,
    read_recent_metrics,
)

TEXT = '{"step": 1, "time": 5.0, "eval_loss": 3}\n[1]\n{"step": 2, "eval_loss": NaN}\n{"st'


def test_half_lines_and_strange_ones_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text(TEXT)
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
    assert read_recent_metrics(file) == [{"step": 1, "time": 5.0, "eval_loss": 3}]
    assert read_first_metrics(file) == {"step": 1, "time": 5.0, "eval_loss": 3}


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_read_has_nothing(tmp_path: Path, kind: str) -> None:
    file = tmp_path if kind == "folder" else tmp_path / "m"
    assert read_first_metrics(file) is None
    assert read_recent_metrics(file) == []
    assert take_new_lines(MetricsFollower(file)) == ([], False)


def take_new_lines(follower: MetricsFollower) -> tuple[list[MetricsLine], bool]:
    lines, is_new = follower.read_new_lines()
    return list(lines), is_new


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    file = tmp_path / "m"
    follower = MetricsFollower(file)
    assert take_new_lines(follower) == ([], False)
    file.write_text('{"step": 1}\n{"step"')
    assert take_new_lines(follower) == ([{"step": 1}], True)
    assert take_new_lines(follower) == ([], False)
    with file.open("a") as more:
        more.write(": 2}\n")
    assert take_new_lines(follower) == ([{"step": 2}], False)
    later = MetricsFollower(file, follower.offset, follower.mark)
    assert take_new_lines(later) == ([], False), "a position may be kept in a file"
    beside = tmp_path / "n"
    beside.write_text('{"step": 1}\n')
    beside.replace(file)
    assert take_new_lines(follower) == ([{"step": 1}], True), "a resumed run writes it anew"


def test_nobody_else_reads_the_file() -> None:
    source = Path(echelon.__file__).parent
    reading = re.compile(
        r"""metrics_file\.(open\((?!"(ab|r\+b)"\))|read_text\b|read_bytes\b)"""
        r"|open\([^)]*metrics_file\b"
    )
    readers = [path for path in source.rglob("*.py") if reading.search(path.read_text())]
    assert readers == []
