"""The picture of a sweep: what it shows, and that it can be read."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from page_reader import PageElement, read_page

from echelon.errors import EchelonError
from echelon.sweep.plot import build_plot_data, plot_sweep
from echelon.sweep.report import SweepReport, build_report
from echelon.sweep.sweep_file import SweepMetric
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_store import LeasedTrial, TrialStore, TrialSummary


def make_report(
    folder: Path, count: int, prefix: str = "", goal: str = "minimize", is_log: bool = False
) -> SweepReport:
    """A sweep in which every third trial was stopped early, and the fifth has no number."""
    drawn, trials = random.Random(1), []
    for number in range(count):
        parameters = {
            "lr": 10 ** drawn.uniform(-5, -1),
            "batch_size": drawn.choice([16, 64, 256]),
            "dropout": drawn.uniform(0, 0.5),
            "optimizer": drawn.choice(["adam", "sgd"]),
        }
        parameters = {prefix + name: value for name, value in parameters.items()}
        value = math.nan if number == 4 else drawn.uniform(0.1, 0.9)
        value = value**9 if is_log else value
        is_pruned = number % 3 == 1
        trials.append(
            TrialSummary(
                *(number, str(number), f"s-{number}", "pruned" if is_pruned else "finished"),
                *(value, parameters, [value] * (2 if is_pruned else 8), ""),
            )
        )
    parts = dict.fromkeys(trials[0].parameters, 0.25) if count > 7 else {}
    sweep = SweepFolder(folder / "s")
    return SweepReport(sweep, SweepMetric("eval/loss", goal), count, trials, parts, "")


def read_sweep_page(
    report: SweepReport, folder: Path, width: int, pointer: tuple[str, float, float] | None = None
) -> dict[str, PageElement]:
    plot_sweep(report, folder / "p.html")
    return read_page(folder / "p.html", width, pointer)


# --- what it shows ---


def test_trials_that_were_stopped_early_count_for_importance(tmp_path: Path) -> None:
    """Most trials of a search with hyperband are: here one of ten is left."""
    sweep = SweepFolder(tmp_path / "s")
    text = "method: random\nparameters:\n  x: {min: 0.0, max: 1.0}\n  y: {min: 0.0, max: 1.0}\n"
    sweep.write_files(SweepSettings([], [], {"name": "loss"}, 40), text)
    store = TrialStore(sweep, "w")
    for number in range(40):
        trial = store.take_trial()
        assert isinstance(trial, LeasedTrial)
        store.report_history(trial, [(trial.parameters["x"] - 0.5) ** 2])
        store.end_trial(trial, "finished" if number % 10 == 0 else "pruned", "")
    importance = build_report(store).importance
    assert sum(importance.values()) == pytest.approx(1)
    assert importance["x"] > 0.6
    note = build_plot_data(build_report(store)).importance_note
    assert note == "what distinguishes the best tenth of 40 trials, 36 of them stopped early"


def test_what_is_not_a_number_is_counted_and_not_drawn(tmp_path: Path) -> None:
    data = build_plot_data(make_report(tmp_path, 12))
    assert len(data.trials) == 11
    assert "1 without a finite value" in data.summary
    assert [trial.rank for trial in data.trials] == list(range(11))
    finished = [trial.value for trial in data.trials if trial.state == "finished"]
    assert finished == sorted(finished)
    assert f"best eval/loss {finished[0]:.5g} in trial {data.trials[0].name}" in data.summary


def test_there_is_nothing_to_draw_without_results(tmp_path: Path) -> None:
    report = make_report(tmp_path, 12)._replace(trials=[])
    with pytest.raises(EchelonError, match="no result to draw"):
        plot_sweep(report, tmp_path / "p.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([16, 64, 256], ["16", "64", "256"]),
        (["sgd", "adam"], ["adam", "sgd"]),
        ([True, False], ["false", "true"]),
        ([0.5], ["0.5"]),
        ([0.123456, 0.5, 0.9], []),  # round ticks are drawn instead
        ([1, 2, 3, 4, 5, 6, 7], []),
    ],
)
def test_values_are_named_where_they_are_few_and_round(
    tmp_path: Path, values: list[Any], labels: list[str]
) -> None:
    trials = [
        TrialSummary(i, str(i), f"s-{i}", "finished", float(i), {"p": value}, [], "")
        for i, value in enumerate(values)
    ]
    report = make_report(tmp_path, 1)._replace(trials=trials)
    axis = build_plot_data(report).axes[0]
    assert [text for _, text in axis.named_values] == labels
    assert all(0 <= place <= 1 for place, _ in axis.named_values)


# --- the page ---


@pytest.mark.parametrize("width", [820, 1320])
@pytest.mark.parametrize(
    ("count", "more"),
    [
        (1, {}),
        (2, {}),
        (12, {"is_log": True}),
        (12, {"prefix": "model.encoder.with_a_long_name.", "goal": "maximize"}),
        (500, {}),
    ],
    ids=lambda value: str(value or ""),
)
@pytest.mark.slow
def test_no_line_strikes_a_label_through(
    tmp_path: Path, count: int, more: dict[str, Any], width: int
) -> None:
    """A label has a plate of the ground's colour, and all lines are painted before it; labels keep
    apart from each other and inside the picture."""
    page = read_sweep_page(make_report(tmp_path, count, **more), tmp_path, width)
    painted = list(page["parallel"].walk())
    last_line = max(
        i
        for i, e in enumerate(painted)
        if e.tag in ("path", "line") and "line" in e.attributes["class"]
    )
    plates = [i for i, e in enumerate(painted) if e.attributes.get("class") == "plate"]
    assert plates
    assert min(plates) > last_line
    labels = [painted[i + 1] for i in plates]
    for plate, label in zip([painted[i] for i in plates], labels, strict=True):
        assert plate["x"] <= label["x"]
        assert plate["width"] >= 6.5 * len(label.text)
    by_axis: dict[float, list[float]] = {}
    for label in labels:
        by_axis.setdefault(label["x"], []).append(label["y"])
        assert label["x"] + 6.5 * len(label.text) <= width
    for ys in by_axis.values():
        assert all(abs(a - b) >= 14 for a, b in itertools.combinations(ys, 2))


@pytest.mark.parametrize("count", [2, 12, 500])
@pytest.mark.parametrize("is_log", [True, False])
def test_the_numbers_of_the_history_are_round(tmp_path: Path, count: int, is_log: bool) -> None:
    page = read_sweep_page(make_report(tmp_path, count, is_log=is_log), tmp_path, 820)
    texts = page["history"].find("text")
    ends = [e.text for e in texts if e.attributes["text-anchor"] == "end"]
    assert len(ends) >= 3
    for text in ends:
        digits = text.split("e")[0].replace(".", "").strip("0")
        assert len(digits) <= 2, f"{text} is not round"
    below = [e.text for e in texts if e.attributes["text-anchor"] == "middle"]
    assert below[-1] == "trial"
    assert all(text.isdecimal() for text in below[:-1])
    assert len(below) > min(count, 3)


def test_a_legend_says_what_the_marks_are(tmp_path: Path) -> None:
    page = read_sweep_page(make_report(tmp_path, 12), tmp_path, 820)
    assert page["legend"].all_text == (
        "finished 8 stopped early 3 best so far, and its parameters "
        "parameters of worse to better trials"
    )
    assert page["notes"].text == "lower is better"
    marks = page["history"].find("circle")
    assert [e.attributes["fill"] == "none" for e in marks].count(True) == 3
    log = read_sweep_page(make_report(tmp_path, 12, is_log=True), tmp_path, 820)
    assert log["notes"].text == "lower is better, log scale"


def test_a_trial_at_the_pointer_explains_itself(tmp_path: Path) -> None:
    report = make_report(tmp_path, 12)
    page = read_sweep_page(report, tmp_path, 820)
    pruned = next(e for e in page["history"].find("circle") if e.attributes["fill"] == "none")
    number = int(pruned["data-n"])
    pointed = read_sweep_page(report, tmp_path, 820, ("history", pruned["cx"], pruned["cy"]))
    said = pointed["tip"].all_text
    assert f"trial {number} stopped early" in said
    assert f"eval/loss {report.trials[number].metric_value:.4g}"[:14] in said
    assert "of 11 (lower is better)" in said
    assert "stopped after 2 evaluations, when others were better" in said
    for name in report.trials[number].parameters:
        assert name in said
    lit = [e for e in pointed["parallel"].find("path") if "on" in e.classes]
    assert [int(e["data-n"]) for e in lit] == [number]
    nothing = read_sweep_page(report, tmp_path, 820, ("history", 0, 0))
    assert nothing["tip"].all_text == ""


def test_names_of_anybody_stay_data(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    plot_sweep(make_report(tmp_path, 12, prefix=evil), tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "alert(1)</script>" not in text
    assert "http" not in text


# --- images ---


@pytest.mark.parametrize(("count", "is_log"), [(1, False), (2, True), (12, True), (500, False)])
@pytest.mark.slow
def test_the_image_has_all_that_the_page_has(tmp_path: Path, count: int, is_log: bool) -> None:
    pytest.importorskip("matplotlib")
    report = make_report(tmp_path, count, prefix="$a$.", is_log=is_log)
    plot_sweep(report, tmp_path / "p.svg")
    words = " ".join(ElementTree.parse(tmp_path / "p.svg").getroot().itertext())
    expected = ["finished", "best so far", "lower is better", "eval/loss", "$a$.lr"]
    expected += ["stopped early"] * (count > 1) + ["importance", "25%"] * (count > 7)
    for word in expected:
        assert word in words
