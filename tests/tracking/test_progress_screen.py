"""A bar on a terminal, plain lines elsewhere; the log has every line and never a bar."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config.schema import LaunchConfig, TrackConfig, TrainerConfig
from echelon.config.settings_help import describe_bundled_settings, render_topic
from echelon.errors import ExitCode
from echelon.runs.run_folder import Run
from echelon.tracking.progress import (
    ProgressBar,
    ProgressLines,
    TrainingDisplay,
    create_progress_display,
)
from echelon.tracking.summary import TrainingProgress, render_sparkline, render_summary
from echelon.train.output_tee import OutputTee

LINE = {"step": 3, "epoch": 1, "loss": 0.25, "samples_per_s": 1234.5}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = create_progress_display("auto", 10, 0)
    assert type(shown) is ProgressLines
    for step in range(1, 9):
        shown.update_progress({**LINE, "step": step})
    assert capsys.readouterr().err == "step 1/10  epoch 1  loss 0.25  1,234 samples/s\n"


FULL = LINE | {"step_ms": 25.92, "mfu": 0.412, "memory_gb": 71.26, "data_ms": 0.1}


def test_lines_say_how_fast_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLines(10).update_progress(FULL)
    told = "step 3/10  epoch 1  loss 0.25  1,234 samples/s  25.9 ms/step  MFU 41%  71.3 GB\n"
    assert capsys.readouterr().err == told


def test_what_a_line_has_not_is_as_it_was() -> None:
    shown = TrainingDisplay()
    shown.update_progress(FULL)
    shown.update_progress({**LINE, "step": 4, "step_ms": 30.0})
    assert shown.latest == {**FULL, "step": 4, "step_ms": 30.0}


@pytest.mark.parametrize(
    ("columns", "said", "unsaid"),
    [
        (60, "1,234 samples/s", "ms/step"),
        (80, "1,234 samples/s  25.9 ms/step", "MFU"),
        (120, "1,234 samples/s  25.9 ms/step  MFU 41%  71.3 GB", "…"),
    ],
)
def test_a_bar_says_what_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, columns: int, said: str, unsaid: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "__stderr__", io.StringIO())
    bar = ProgressBar(1000, 0)
    bar.draw({**FULL, "step": 900})
    bar.close()
    text = ANSI.sub("", sys.__stderr__.getvalue())  # type: ignore[union-attr]
    drawn = text.replace("\r", "\n").splitlines()
    [line] = {line for line in drawn if "loss" in line}
    assert said in line
    assert unsaid not in line
    assert "━" * 8 in line
    assert "900/1000" in line
    assert len(line) <= columns


def test_none_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = create_progress_display("none", 10, 0)
    assert type(shown) is TrainingDisplay
    shown.update_progress(LINE)
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = create_progress_display("auto", 10, 0)
    shown.close()
    assert type(shown) is ProgressBar


def test_a_curve_in_one_line() -> None:
    assert render_sparkline([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert render_sparkline([]) == ""
    assert render_sparkline([1.0, 1.0]) == "▁▁"
    assert len(render_sparkline([float(i) for i in range(1000)])) == 32


def test_the_help_knows_every_setting() -> None:
    text = render_topic("all", describe_bundled_settings("toy"))
    for section, kind in (
        ("trainer", TrainerConfig),
        ("launch", LaunchConfig),
        ("track", TrackConfig),
    ):
        for name in set(kind.__dataclass_fields__) - {"kind"}:
            assert f"  {section}.{name}" in text


@pytest.mark.slow
def test_a_training_on_a_terminal_and_what_its_log_keeps(tmp_path: Path) -> None:
    words = ["train", "launch=local", "launch.procs=2", "trainer.epochs=2", "trainer.log_steps=1"]
    text = _on_a_terminal([sys.executable, "-m", "echelon", *words], tmp_path)
    assert "\x1b[?25l" in text, "the cursor hides while a bar is drawn"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "and comes back"
    plain = ANSI.sub("", text)
    assert "128/128" in plain
    assert "━" in plain
    assert plain.count("evaluated after step 64") == 1, "what is printed stands above the bar"
    assert plain.index("evaluated after step 64") < plain.index("finished 128 steps")
    (log,) = tmp_path.glob("runs/toy-*/logs/rank-0.log")
    assert "evaluated after step 64" in log.read_text()
    assert "━" not in log.read_text()
    assert "\x1b" not in log.read_text()


def _on_a_terminal(command: list[str], folder: Path) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = bytearray()
    while chunk := _read(ours):
        read += chunk
    os.close(ours)
    assert process.wait(300) == 0, read.decode()
    return read.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how a terminal says that nobody writes any more
        return b""


@pytest.mark.parametrize(("chosen", "ascii_only"), [("C", True), ("C.UTF-8", False)])
def test_last_words_in_letters_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, ascii_only: bool
) -> None:
    monkeypatch.setenv("LC_ALL", chosen)
    run = Run(tmp_path)
    run.metrics_file.write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    said = render_summary(run, ExitCode.OK, TrainingProgress(0, 2, 2, 1.0), "", {})
    assert said.isascii() == ascii_only
    assert ("1 #_ 0.5" if ascii_only else "1 █▁ 0.5") in said
    assert "trainer.epochs=" in said
    assert "trainer.steps=" in render_summary(
        run, ExitCode.OK, TrainingProgress(0, 2, 2, 1.0), "", {}, "trainer.steps"
    )


def test_a_reader_that_leaves_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `echelon train 2>&1 | head` does."""
    reader, writer = os.pipe()
    with open(writer, "w", buffering=1) as left:
        monkeypatch.setattr(sys, "stdout", left)
        monkeypatch.setattr(sys, "stderr", left)
        output = OutputTee()
        output.log_to(tmp_path / "log")
        os.close(reader)
        for i in range(3):
            print(f"step {i}", file=sys.stderr)
            sys.stderr.flush()
        output.close()
        left.flush()
    assert (tmp_path / "log").read_text() == "step 0\nstep 1\nstep 2\n"
