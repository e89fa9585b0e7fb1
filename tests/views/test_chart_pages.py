"""What the pages of plots and sweeps share: colours, ticks, and the file around them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_reader import read_page, run_chart_script
from run_folders import echelon as verb
from run_folders import lines, make_run

import echelon.sweep
import echelon.views
from echelon.views.html_page import fill_page_template
from echelon.views.palette import COLOURS, blend_by_goodness

VIEWS = Path(echelon.views.__file__).parent
SCRIPT = VIEWS / "chart.js"


# --- colours ---


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def theme_colours(name: str) -> list[str]:
    """What the style gives a variable: the light theme, then the dark one."""
    return re.findall(rf"--{name}: (#\w{{6}});", (VIEWS / "chart.css").read_text())


SCALE = [blend_by_goodness(step / 20) for step in range(21)]


@pytest.mark.parametrize("colour", [*COLOURS, *SCALE])
def test_every_mark_can_be_seen_on_black_on_white_and_on_the_cards(colour: str) -> None:
    cards = theme_colours("card")
    assert len(cards) == 2
    for ground in ("#000000", "#ffffff", *cards):
        assert contrast(colour, ground) >= 3, f"{colour} on {ground}"


def test_texts_can_be_read_in_both_themes() -> None:
    for ink in ("ink", "soft"):
        for ground in ("card", "back"):
            for text, below in zip(theme_colours(ink), theme_colours(ground), strict=True):
                assert contrast(text, below) >= 4.5, f"--{ink} {text} on --{ground} {below}"


# --- ticks ---


TICKS: dict[str, list[Any]] = {
    "ticks(0, 40, 4)": [0, 10, 20, 30, 40],
    "ticks(1, 41, 3.9)": [10, 20, 30, 40],
    "ticks(0.07, 0.93, 5)": [0.2, 0.4, 0.6, 0.8],
    "ticks(0, 3, 10, true)": [0, 1, 2, 3],
    "ticks(0.5, 1.5, 4, true)": [1],
    "ticks(2, 14, 5, true)": [2, 4, 6, 8, 10, 12, 14],
    "ticks(3, 3, 5)": [],
    "ticks(0, Infinity, 5)": [],
    "logTicks(0.9, 1200)": [1, 10, 100, 1000],
    "logTicks(1, 12)": [1, 2, 5, 10],
    "logTicks(2.1, 3.9)": [2.5, 3, 3.5],
    "tickLabels([0.95, 1, 1.05])": ["0.95", "1.00", "1.05"],
    "tickLabels([1000.01, 1000.02])": ["1000.01", "1000.02"],
    "tickLabels([0.001, 0.01, 10], true)": ["0.001", "0.01", "10"],
    "tickLabels([0, 2e-7, 4e-7])": ["0", "2e-7", "4e-7"],
    "tickLabels([2e6, 2.5e6])": ["2.0e6", "2.5e6"],
}


def test_ticks_are_round() -> None:
    found = run_chart_script(SCRIPT, f"[{', '.join(TICKS)}]")
    assert dict(zip(TICKS, found, strict=True)) == TICKS


def test_there_are_three_ticks_on_any_axis() -> None:
    """And none of a hundred thousand, nor an endless loop where numbers have no room left."""
    ranges = "[[0, 1], [1, 41], [-0.3, 0.9], [1e9, 1e9 + 3], [1e-9, 1.7e-9], [99, 101.2], [1, 1e6]]"
    counts = run_chart_script(
        SCRIPT,
        f"{ranges}.flatMap(r => [2, 3, 5, 9].map(n => ticks(...r, n).length))",
    )
    assert min(counts) >= 3
    assert max(counts) <= 20
    assert run_chart_script(SCRIPT, "ticks(1e16, 1e16 + 2, 5).length") <= 3


# --- the file ---


def test_a_title_stays_a_title(tmp_path: Path) -> None:
    template = tmp_path / "t.html"
    template.write_text("<h1>%TITLE%</h1><script>%DATA%</script>")
    page = fill_page_template(template, "%DATA% <b>", {"a": "%TITLE% </script>"})
    assert page == '<h1>%DATA% &lt;b&gt;</h1><script>{"a":"%TITLE% \\u003c/script>"}</script>'


@pytest.mark.parametrize(
    "template", [VIEWS / "page.html", Path(echelon.sweep.__file__).with_name("page.html")]
)
def test_pages_share_their_ticks_and_their_style(template: Path) -> None:
    text = template.read_text()
    assert "%CHART%" in text
    assert "%STYLE%" in text
    assert not re.search(r"function \w*[tT]icks|#[0-9a-fA-F]{6}", text), "a copy of its own"


@pytest.mark.parametrize("width", [393, 1200])
def test_the_page_of_a_plot_has_a_title_and_three_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """A panel is 393 pixels wide in a window of 900. All panels have the same numbers below."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "seed-1", lines(41))
    assert verb(capsys, "plot", "seed-1", "-o", "a.html")[0] == 0
    title = "seed-1: loss, eval_loss, eval_acc over step"
    assert f"<h1>{title}</h1>" in (tmp_path / "a.html").read_text()
    canvases = read_page(tmp_path / "a.html", width)["panels"].find("canvas")
    below = [
        [text for text, _, y in canvas.written if y == 300 - 38 + 7 and text != "step"]
        for canvas in canvases
    ]
    assert len(canvases) == 3
    assert below[0] == below[1] == below[2]
    assert len(below[0]) >= 3
    for canvas in canvases:
        assert len([text for text, x, _ in canvas.written if x == 58 - 8]) >= 3
