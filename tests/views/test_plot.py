"""`echelon plot`: which runs and metrics, and what is in the file."""

from __future__ import annotations

import builtins
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from run_folders import STARTED, lines, make_run, write_phases
from run_folders import echelon as verb

from echelon.runs.curves import build_scale, load_metrics
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run
from echelon.views.plot_data import Plot, PlotOptions, build_plot


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for number in (10, 9, 1):
        make_run(root, f"seed-{number}", lines(), {"epochs": 4}, lr=number)
    make_run(root, "other", lines())
    make_run(root, "empty")
    (root / "latest").symlink_to("other")
    return root


def page_data(path: Path) -> dict[str, Any]:
    text = path.read_text()
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data: dict[str, Any] = json.loads(found)
    return data


def drawn_names(path: Path) -> list[str]:
    return [run["name"] for run in page_data(path)["runs"]]


# --- which runs ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["latest"], ["other"]),
        (["runs/seed-9"], ["seed-9"]),
        (["seed-*"], ["seed-1", "seed-9", "seed-10"]),
        (["other", "seed-?", "seed-1"], ["other", "seed-1", "seed-9"]),
        (["runs/seed-1*"], ["seed-1", "seed-10"]),
        (["*"], ["other", "seed-1", "seed-9", "seed-10"]),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("several")
def test_runs_by_name_by_folder_and_by_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    code, out, err = verb(capsys, "plot", *words, "-o", "out/a.html")
    assert code == 0, err
    assert out == "out/a.html\n", "the name of the file, and nothing else"
    assert drawn_names(tmp_path / "out/a.html") == expected
    assert ("empty: no numbers to draw, left out" in err) == ("*" in words)


def test_a_run_may_be_called_like_a_pattern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "a[1] $x_$", lines())
    for name in ("a.html", "a.svg"):
        code, _, err = verb(capsys, "plot", "a[1] $x_$", "-o", name)
        assert code == 0, err
    assert drawn_names(tmp_path / "a.html") == ["a[1] $x_$"]
    assert "$x_$" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "is_best"),
    [
        *((name, "max") for name in ("acc", "BinaryAccuracy", "top5_acc", "recall@10", "mAP50")),
        *((name, "max") for name in ("F1Score", "r2", "hit_rate", "mean_iou", "score")),
        *((name, "min") for name in ("mape", "smape", "accumulated_error", "loss", "chitchat")),
    ],
)
def test_what_is_better_by_its_name(tmp_path: Path, name: str, is_best: str) -> None:
    run = make_run(tmp_path / "runs", "a", [{"step": 1, f"eval_{name}": 1.0}])
    [record], _ = read_run_records([run])
    assert load_metrics(record).curves[f"eval_{name}"].best_is == is_best


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sed-1"], 3, "did you mean 'seed-1'"),
        (["sed-*"], 3, "no run 'sed-*'"),
        (["empty"], 3, "empty: no numbers to draw"),
        (["other", "--metric", "ac"], 3, "did you mean 'acc'"),
        (["other", "-o", "a.gif"], 2, "one of .png, .svg, .html"),
        (["other", "-o", "a"], 2, "one of .png, .svg, .html"),
        (["other", "-o", "runs/other/config.json/a.html"], 2, "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("several")
def test_what_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended, out, err = verb(capsys, "plot", *words)
    assert (ended, out) == (code, "")
    assert said in err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


@pytest.mark.usefixtures("several")
def test_a_folder_that_is_not_writable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("root may write anywhere")
    code, _, err = verb(capsys, "plot", "other", "-o", "closed/a.html")
    assert code == 2
    assert "permission denied" in err


@pytest.mark.usefixtures("several")
def test_without_matplotlib_there_is_a_line_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "echelon.views.plot_image", raising=False)
    code, _, err = verb(capsys, "plot", "other")
    assert code == 2
    assert "pip install 'echelon[plot]'" in err
    assert verb(capsys, "plot", "other", "-o", "a.html")[0] == 0


# --- what is drawn ---


def sheet_of(root: Path, names: list[str], *metrics: str, **wanted: Any) -> Plot:
    found, _ = read_run_records([Run(root / name) for name in names])
    options = {"x": "step", "smooth": None, "is_log": None, "title": ""} | wanted
    return build_plot(
        found, [load_metrics(record) for record in found], PlotOptions(metrics, **options)
    )


def test_the_loss_then_what_decides_then_the_rest(several: Path) -> None:
    assert [p.metric for p in sheet_of(several, ["other"]).panels] == [
        *("loss", "eval_loss", "eval_acc")
    ]
    asked = sheet_of(several, ["other"], "lr", "acc")
    assert [p.metric for p in asked.panels] == ["lr", "eval_acc"]
    assert [p.best_is for p in asked.panels] == ["min", "max"]


def test_the_legend_says_what_differs(several: Path) -> None:
    made = sheet_of(several, ["seed-1", "seed-9"])
    assert [str(run) for run in made.legend] == ["seed-1  lr=1", "seed-9  lr=9"]
    assert [str(run) for run in sheet_of(several, ["seed-1"]).legend] == ["seed-1"]


def test_the_best_is_marked(several: Path) -> None:
    loss, evaluated, _ = sheet_of(several, ["seed-1", "other"]).panels
    assert loss.is_log, "it falls from 4 to 0.1"
    assert not evaluated.is_log
    line = evaluated.best_line
    assert (line.xs[line.best_index], line.ys[line.best_index]) == (30, 1.0)


@pytest.mark.parametrize(
    ("x", "first", "last", "label"),
    [
        ("step", 10, 40, "step"),
        ("samples", 320, 1280, "samples"),
        ("epoch", 1, 4, "epoch"),
        ("time", 10, 40, "time at work (s)"),
    ],
)
def test_evaluations_lie_where_their_steps_are_on_every_axis(
    several: Path, x: str, first: float, last: float, label: str
) -> None:
    """Their lines have neither samples nor a time."""
    made = sheet_of(several, ["seed-1"], "eval_loss", x=x)
    (line,) = made.panels[0].lines
    assert [line.xs[0], line.xs[-1]] == pytest.approx([first, last])
    assert made.x == label


def test_epochs_of_a_run_that_counts_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines(40), {"steps": 35, "epochs": 3})
    [record], _ = read_run_records([run])
    assert build_scale("epoch", record, load_metrics(record)).convert(25) == pytest.approx(2.5)


def test_a_run_that_diverges_does_not_press_the_others_flat(several: Path) -> None:
    make_run(several, "away", [{**li, "loss": 10.0 ** li["step"]} for li in lines(20)])
    loss = sheet_of(several, ["seed-1", "away"]).panels[0]
    assert loss.y_limit == pytest.approx(4.8)
    assert loss.notes == "log scale, 1 run leaves the scale"
    assert sheet_of(several, ["away"]).panels[0].y_limit is None


def test_what_has_no_logarithm_is_left_out(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = [{**line, "eval_acc": 0.0} if line["step"] == 20 else line for line in lines()]
    make_run(several, "zero", zero)
    (panel,) = sheet_of(several, ["zero"], "eval_acc", is_log=True).panels
    assert panel.lines[0].xs == [10, 30, 40]
    assert "no logarithm" in capsys.readouterr().err


def test_noise_is_smoothed_and_a_few_points_never(tmp_path: Path) -> None:
    noisy = [{**li, "loss": 1 + li["step"] % 2} if "loss" in li else li for li in lines(200)]
    make_run(tmp_path / "runs", "a", noisy)
    loss, evaluated, _ = sheet_of(tmp_path / "runs", ["a"]).panels
    assert loss.lines[0].smoothed is not None
    assert max(loss.lines[0].smoothed[50:]) < 1.7
    assert sheet_of(tmp_path / "runs", ["a"], smooth=0.0).panels[0].lines[0].smoothed is None
    assert len(evaluated.lines[0].ys) == 20
    assert evaluated.lines[0].smoothed is None


# --- files ---


def test_a_page_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor can a name get out of its data."""
    evil = "</script><script>alert(1)</script>"
    found = lines()
    found[4]["loss"] = math.nan
    make_run(tmp_path / "runs", "a", found, text=evil)
    make_run(tmp_path / "runs", "b", found, text="x")
    code, _, err = verb(capsys, "plot", "a", "b", "-o", "a.html", "--title", evil)
    assert code == 0
    assert "2 values are not finite" in err
    text = (tmp_path / "a.html").read_text()
    assert "alert(1)</script>" not in text
    assert not re.search(r"https?:|//[a-z]|src=|href=|@import|url\(", text.split('id="data"')[0])
    assert not re.search(r"https?:|fetch\(|import\(|XMLHttp|innerHTML", text)
    data = page_data(tmp_path / "a.html")
    assert data["runs"][0]["differs"] == f"text={evil}"
    assert len(data["panels"][0]["lines"][0]["x"]) == 39


@pytest.mark.slow
def test_a_page_stays_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        make_run(tmp_path / "runs", f"r{number}", lines(5000, every=500))
    assert verb(capsys, "plot", "r*", "-o", "a.html")[0] == 0
    assert (tmp_path / "a.html").stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["other"], "other: loss, eval_loss, eval_acc over step"),
        (["seed-1", "seed-9"], "seed-1, seed-9: loss, eval_loss, eval_acc over step"),
        (["x" * 60], "1 run: loss, eval_loss, eval_acc over step"),
    ],
)
def test_a_plot_has_a_title(several: Path, names: list[str], title: str) -> None:
    make_run(several, "x" * 60, lines())
    assert sheet_of(several, names).title == title
    assert sheet_of(several, names, title="Mine").title == "Mine"


def test_the_panels_of_an_image_share_their_x_range(several: Path) -> None:
    """The first evaluation is at step 10, the first loss at step 1."""
    pytest.importorskip("matplotlib")
    from echelon.views.plot_image import build_figure

    figure = build_figure(sheet_of(several, ["seed-1", "other"]))
    ranges = [axes.get_xlim() for axes in figure.axes]
    assert len(ranges) == 3
    assert len(set(ranges)) == 1
    low, high = ranges[0]
    assert low < 1 < 40 < high
    for axes in figure.axes:
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 3


@pytest.mark.usefixtures("several")
@pytest.mark.slow
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert verb(capsys, "plot", "seed-*", "other", "--title", "All")[:2] == (0, "curves.png\n")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    make_run(tmp_path / "runs", "away", [{**li, "loss": 10.0 ** li["step"]} for li in lines(20)])
    assert verb(capsys, "plot", "other", "away", "-o", "a.SVG", "--x", "time", "--log")[0] == 0
    root = ElementTree.parse(tmp_path / "a.SVG").getroot()
    words = " ".join(root.itertext())
    for word in ("eval_acc", "higher is better", "time at work (s)", "log scale", "other"):
        assert word in words
    assert sorted(p.name for p in tmp_path.glob("*.*")) == ["a.SVG", "curves.png"]


def test_a_stopped_run_is_drawn_without_its_pause(tmp_path: Path) -> None:
    late = [{**li, "time": li["time"] + 900} if "time" in li else li for li in lines()[22:]]
    run = make_run(tmp_path / "runs", "a", lines()[:22] + late)
    write_phases(run, (STARTED, STARTED + 20, 0, 20), (STARTED + 920, STARTED + 940, 20, 40))
    [record], _ = read_run_records([run])
    trained_s = load_metrics(record).axis_points.trained_s
    assert trained_s == pytest.approx([float(step) for step in range(1, 41)])
