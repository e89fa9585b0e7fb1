"""`echelon show`: one run, its results, and curves in letters."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import echelon, lines, make_run

from echelon.cli import run_and_report_faults, run_command
from echelon.utils.text import can_print_unicode
from echelon.views.smoothing import choose_smoothing_factor, select_point_indices, smooth_values
from echelon.views.text_chart import (
    ASCII,
    BRAILLE,
    Glyphs,
    TextPanel,
    draw_panel,
    join_side_by_side,
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_there_is_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"best": 1.0, "step": 40, "total_steps": 40}
    run = make_run(tmp_path / "runs", "a", lines(), {"epochs": 4}, done, lr=0.5, noise=0.1)
    for step in (20, 30, 40):
        (run.snapshots_folder / f"step-{step:09d}").mkdir(parents=True)
    (run.snapshots_folder / "best").symlink_to("step-000000030")
    (tmp_path / "runs/latest").symlink_to("a")
    code, out, err = echelon(capsys, "show", "latest")
    assert (code, err) == (0, "")
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert shown[0] == "a finished"
    assert "experiment toy (echelon.recipes.toy:experiment)" in shown
    assert "where inline, 1 node, 1 process" in shown
    assert "progress 40 of 40 steps" in shown
    assert "speed 32 samples/s" in shown
    assert "settings lr=0.5 trainer.epochs=4" in shown, "0.1 is the noise by default"
    assert "loss 0.1000 40 lowest 0.1000 40" in shown
    assert "eval_loss 1.000 30 lowest 1.100 40" in shown
    assert "eval_acc 0.4000 40 highest 0.4000 40" in shown
    assert "snapshots runs/a/snapshots at step 20, 30 (best), 40" in shown
    assert "go on echelon resume a trainer.epochs=…" in shown
    assert "loss (log)" in out
    assert "⠤" in out


def test_a_run_of_so_many_steps_goes_on_with_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "a", lines(), {"steps": 40}, {"step": 40, "total_steps": 40})
    _, out, _ = echelon(capsys, "show", "a")
    assert "echelon resume a trainer.steps=…" in out


def test_how_fast_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = {"data_ms": 0.1, "compute_ms": 9.0, "communication_ms": 2.0, "optimizer_ms": 1.234}
    more = {"step_ms": 1000.0, "mfu": 0.412, "memory_gb": 71.26}
    behind = {"slowest_rank": 3, "slowest_x": 2.1}
    told = [line | (split | more | behind if "lr" in line else {}) for line in lines()]
    make_run(tmp_path / "runs", "a", told, {"epochs": 4})
    _, out, _ = echelon(capsys, "show", "a")
    shown = " ".join(out.split())
    assert "speed 32 samples/s, 1,000 ms/step, MFU 41%, 71.3 GB; of a step: data 0.1, " in shown
    assert "compute 9, communication 2, optimizer 1.23 ms; rank 3 takes 2.1 × the median" in shown
    assert "step_ms" not in out, "it has no best, and no panel unless it is asked for"
    page = tmp_path / "speed.html"
    code, _, _ = echelon(
        capsys, "plot", "a", "--metric", "step_ms", "samples_per_s", "-o", str(page)
    )
    assert code == 0
    assert '"metric": "step_ms"' in page.read_text() or '"metric":"step_ms"' in page.read_text()


def test_the_same_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs", "a", lines(), {"epochs": 4}, lr=0.5)
    data = json.loads(echelon(capsys, "show", "a", "--json")[1])
    assert (data["version"], data["run"], data["trained_s"]) == (1, "a", 40.0)
    assert data["settings"] == {"lr": "0.5", "trainer.epochs": "4"}
    assert data["metrics"]["eval_loss"] == {
        **{"is": "min", "best": 1.0, "best_step": 30, "last": 1.1, "last_step": 40, "count": 4}
    }


def test_no_numbers_are_no_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs", "failed", status={"state": "failed"})
    make_run(tmp_path / "runs", "point", lines(1))
    program = make_run(tmp_path / "runs", "program")
    config = json.loads(program.config_file.read_text())
    program.config_file.write_text(
        json.dumps(config | {"experiment": {}, "program": ["sh", "a b.sh"]})
    )
    assert "it left no numbers" in echelon(capsys, "show", "failed")[1]
    assert "one point makes none" in echelon(capsys, "show", "point")[1]
    out = echelon(capsys, "show", "program")[1]
    assert "the program sh 'a b.sh'" in out
    assert "keeps its numbers to itself" in out


def test_values_that_are_not_finite_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines()
    found[3]["loss"], found[5]["loss"], found[7]["loss"] = math.nan, math.inf, -math.inf
    make_run(tmp_path / "runs", "a", found)
    assert "3 values were not finite" in echelon(capsys, "show", "a")[1]


def test_an_unknown_run_has_a_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "echelon train" in echelon(capsys, "show", "a")[2]
    make_run(tmp_path / "runs", "seed-1")
    code, out, err = echelon(capsys, "show", "sed-1")
    assert (code, out) == (3, "")
    assert "did you mean 'seed-1'?" in err


@pytest.mark.parametrize("width", [60, 80, 140, 250])
def test_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    make_run(tmp_path / "runs", "a", lines(), **{f"setting_{n}": n for n in range(20)})  # type: ignore[arg-type]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = echelon(capsys, "show", "a")
    assert max(map(len, out.splitlines())) <= width
    assert out.count("┤") == 9, "three numbers on each of three axes"


def test_a_narrow_table_says_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs", "a", lines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = echelon(capsys, "show", "a")
    [head] = [line for line in out.splitlines() if "METRIC" in line]
    assert head.split() == ["METRIC", "BEST", "LAST"]


def test_ascii_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs", "a", lines(), lr=0.1)
    make_run(tmp_path / "runs", "b", lr=0.2)
    monkeypatch.setenv("LC_ALL", "C")
    make_run(tmp_path / "runs", "c", status={"state": "failed", "world": 2})
    for words in (["show", "a"], ["runs"], ["jobs"]):
        code, out, _ = echelon(capsys, *words)
        assert code == 0
        assert out.isascii()


@pytest.mark.parametrize(
    ("encoding", "env", "more"),
    [
        ("utf-8", {}, True),
        ("utf-8", {"LANG": "en_GB.UTF-8"}, True),
        ("utf-8", {"LANG": "C"}, False),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "en_GB.UTF-8"}, True),
        ("utf-8", {"LC_ALL": "POSIX", "LC_CTYPE": "en_GB.UTF-8"}, False),
        ("latin-1", {"LANG": "de_DE"}, False),
        ("ascii", {}, False),
    ],
)
def test_what_a_terminal_can_show(encoding: str, env: dict[str, str], more: bool) -> None:
    assert can_print_unicode(io.TextIOWrapper(io.BytesIO(), encoding), env) is more


# --- the canvas ---


def test_a_falling_line() -> None:
    panel = TextPanel("loss", range(16), [7 - n * 7 / 15 for n in range(16)], "at")
    assert draw_panel(panel, 17, 4, BRAILLE) == [
        "         loss    ",
        "       7┤⠑⢄      ",
        "        │  ⠑⢄    ",
        "     3.5┤    ⠑⢄  ",
        "       0┤      ⠑⢄",
        "        └────────",
        "         0  at 15",
    ]
    assert draw_panel(panel, 17, 4, ASCII)[1:5] == [
        "       7|'.      ",
        "        |  '.    ",
        "     3.5|    '.  ",
        "       0|      '.",
    ]


def test_a_flat_line_lies_in_the_middle() -> None:
    rows = draw_panel(TextPanel("a", [1, 2], [5.0, 5.0], "step"), 20, 3, BRAILLE)
    assert "5┤" in rows[2]
    assert rows[1].strip(" │┤") == ""


def test_a_long_fall_is_logarithmic_and_says_so() -> None:
    rows = draw_panel(TextPanel("a", [1, 2, 3], [100.0, 10.0, 1.0], "step"), 30, 5, BRAILLE)
    assert "a (log)" in rows[0]
    assert rows[3].split("┤")[0].strip() == "10"


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    width=st.integers(28, 90),
    letters=st.sampled_from([BRAILLE, ASCII]),
)
def test_any_finite_values_can_be_drawn(values: list[float], width: int, letters: Glyphs) -> None:
    rows = draw_panel(
        TextPanel("metric", list(range(len(values))), values, "step"), width, 6, letters
    )
    assert len(rows) == 9
    assert {len(row) for row in rows} == {width}
    assert len(join_side_by_side([rows, rows])) == 9


# --- smoothing ---


def test_smoothing_keeps_a_constant_and_forgets_noise() -> None:
    assert smooth_values([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smooth_values([1.0, 100.0], 0.5, is_log=True)[1] == pytest.approx(100 ** (5 / 6))
    smooth = [1 - n / 200 for n in range(200)]
    noisy = [v + 0.1 * (-1) ** n for n, v in enumerate(smooth)]
    assert choose_smoothing_factor(smooth) == 0
    assert choose_smoothing_factor(noisy[:10]) == 0, "each of a few is worth seeing"
    assert 0.5 < choose_smoothing_factor(noisy) < 1


def test_thinning_keeps_ends_spikes_and_the_best() -> None:
    ys = [0.5] * 100_000
    ys[77_777] = 9.0
    kept = select_point_indices(ys, 1000, required_index=123)
    assert {0, 123, 77_777, 99_999} <= set(kept)
    assert len(kept) < 1010
    assert select_point_indices([1.0, 2.0], 10, 0) == [0, 1]


@pytest.mark.parametrize("words", ["show a", "runs", "jobs", "explain", "logs a", "--help"])
def test_a_reader_that_leaves_is_no_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs", "a", lines()).get_rank_log_file(0).write_text("a\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run_and_report_faults(lambda: run_command(words.split())) == 0


def test_a_reader_that_leaves_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    def fails() -> int:
        print("and then")
        return 1

    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run_and_report_faults(fails) == 1
