"""Lists read small files: what they show of metrics.jsonl is in summary.json, as far as it goes."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from run_folders import lines, make_run

from echelon.errors import ExitCode
from echelon.runs import metrics_file
from echelon.runs.metrics_summary import load_summary, read_summary
from echelon.runs.run_folder import Run
from echelon.tracking.metrics_writer import MetricsFile


def append(run: Run, *added: object) -> None:
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in added)


class ParseCount:
    """How many lines were parsed since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._parse, self._count = metrics_file._parse_line, 0
        monkeypatch.setattr(metrics_file, "_parse_line", self._count_line)

    def _count_line(self, text: bytes) -> metrics_file.MetricsLine | None:
        self._count += 1
        return self._parse(text)

    def take(self) -> int:
        count, self._count = self._count, 0
        return count


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [*lines(), {"step": 41, "loss": math.nan}, {"loss": 9}])
    summary = read_summary(run)
    assert summary.not_finite == 1
    assert (summary.last_step, summary.last_training_step) == (41, 40)
    loss, evaluated = summary.metrics["loss"], summary.metrics["eval_loss"]
    assert (loss.count, loss.last, loss.last_step, loss.max, loss.max_step) == (40, 0.1, 40, 4.0, 1)
    assert (evaluated.min, evaluated.min_step) == (1.0, 30)
    assert evaluated.get_best("max") == evaluated.max == 1.2


def test_no_line_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that a program writes, too."""
    parsed = ParseCount(monkeypatch)
    run = make_run(tmp_path, "a", lines(1000))
    first = read_summary(run)
    assert parsed.take() == 1100
    assert read_summary(run) == first
    assert parsed.take() == 0
    append(run, {"step": 1001, "loss": 0.001})
    assert read_summary(run).metrics["loss"].min == 0.001
    assert parsed.take() == 1
    copied = Run(Path(shutil.copytree(run.folder, tmp_path / "copied")))
    assert read_summary(copied).last_step == 1001
    assert parsed.take() == 1


def test_a_file_that_began_anew_is_read_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", lines(1000))
    read_summary(run)
    run.metrics_file.write_text('{"step": 1, "loss": 7.0}\n')
    assert read_summary(run).metrics["loss"].count == 1
    run.metrics_file.write_text(
        "".join(json.dumps({"step": n, "loss": n}) + "\n" for n in range(9999))
    )
    assert read_summary(run).metrics["loss"].max == 9998


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "metrics": 3}'])
def test_a_damaged_summary_is_none(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, "a", lines())
    run.summary_file.write_text(text)
    assert read_summary(run).metrics["loss"].count == 40


def test_nothing_is_left_in_the_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a", lines(1000))
    monkeypatch.setattr(os, "geteuid", lambda: run.folder.stat().st_uid + 1)
    assert read_summary(run).last_step == 1000
    assert not run.summary_file.exists()


def test_a_training_keeps_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "a", lines(40))
    file = MetricsFile(run, 30)
    assert [line["step"] for line in file.read_past_lines()][-1] == 30
    file.log({"step": 31, "loss": 0.001, "time": 5.0})
    file.close(ExitCode.OK)
    parsed = ParseCount(monkeypatch)
    summary = read_summary(run)
    assert parsed.take() == 0
    assert (summary.metrics["loss"].min_step, summary.metrics["loss"].count) == (31, 31)
    assert summary.updated is not None


def test_a_training_that_was_killed_left_a_summary_to_go_on_from(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    file = MetricsFile(run, 0)
    file.log({"step": 1, "loss": 3.0})
    assert load_summary(run).offset == 0, "it is written every few seconds"
    assert read_summary(run).metrics["loss"].last == 3.0
    file.close(ExitCode.OK)
    assert load_summary(run).offset == run.metrics_file.stat().st_size
