"""The charts of the board in a real browser: curves and what is done with them, other charts,
media, and what is saved of them."""

from __future__ import annotations

import csv
import struct
from functools import partial
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from board_pages import (
    EVAL_LOSS,
    LOSS,
    OpenBoard,
    count_pixels,
    list_rows,
    read_last_points,
    read_points,
    read_zoom,
    save_chart,
    wait_for_count,
)
from board_runs import RunTemplate, write_long_run, write_runs
from browser import Browser, Key

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

PLOT, OVERLAY = f"{LOSS} .u-over", f"{EVAL_LOSS} .cv-overlay"


def test_zoom_and_pan(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_runs(root, template, 12, points=200)
    open_board(root)
    browser.wait("curves", lambda: len(read_last_points(browser)) == 10)
    # 1. A part is chosen by dragging over it, in all charts.
    browser.drag(PLOT, (0.4, 0.5), (0.6, 0.5))
    low, high = browser.wait("the zoom", lambda: read_zoom(browser))
    assert 60 < low < 90
    assert 110 < high < 140
    for metric, least in (("loss", 10 * 30), ("eval_loss", 10 * 2)):
        points = read_points(browser, saved, metric)
        steps = [float(point["step"]) for point in points]
        assert low <= min(steps) <= max(steps) <= high
        assert len(steps) >= least
    # 2. It is moved with shift, and by keys.
    browser.drag(PLOT, (0.8, 0.5), (0.3, 0.5), Key.SHIFT)
    browser.wait("later", lambda: (read_zoom(browser) or (0, 0))[0] > low + 10)
    assert measure_zoom(browser) == pytest.approx(high - low)
    browser.run("document.querySelector(arguments[0]).focus()", f"{LOSS} .cv-plot")
    browser.press("-")
    browser.wait("wider", lambda: measure_zoom(browser) > 1.2 * (high - low))
    browser.press("+")
    browser.wait("as before", lambda: measure_zoom(browser) == pytest.approx(high - low))
    # 3. The wheel zooms where the chart has the focus.
    browser.turn_wheel(PLOT, -120)
    browser.wait("nearer", lambda: measure_zoom(browser) < 0.8 * (high - low))
    browser.press("0")
    browser.wait("all of it", lambda: read_zoom(browser) is None)
    # 4. A double click and a button end it.
    browser.drag(f"{EVAL_LOSS} .u-over", (0.2, 0.5), (0.5, 0.5))
    browser.wait("the zoom", lambda: read_zoom(browser))
    browser.double_click(PLOT)
    browser.wait("all of it", lambda: read_zoom(browser) is None)
    browser.drag(PLOT, (0.2, 0.5), (0.5, 0.5))
    browser.wait("the zoom", lambda: read_zoom(browser))
    url = browser.url
    browser.click("button[aria-label='Reset zoom']")
    browser.wait("all of it", lambda: read_zoom(browser) is None)
    # 5. It is in the address.
    browser.open(url)
    browser.wait("curves", lambda: len(read_last_points(browser)) == 10)
    assert max(float(p["step"]) for p in read_points(browser, saved, "loss")) < 110


def test_one_cursor_for_all_charts(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3, points=100)
    open_board(root)
    browser.wait("curves", lambda: len(read_last_points(browser, "eval_loss")) == 3)
    browser.wait("a chart", lambda: browser.find(f"{EVAL_LOSS} .u-over"))
    assert count_pixels(browser, OVERLAY, 0) == 0
    browser.hover(PLOT)
    browser.wait_for(".cv-tip", "toy-00001")
    assert "Step 5" in browser.wait_for(".cv-tip-head").text
    browser.wait("a line", lambda: count_pixels(browser, OVERLAY, 0) > 100)
    browser.hover(".cv-key", "toy-00001")
    browser.wait_until_gone(".cv-tip", "toy-00001")
    for panel in (LOSS, EVAL_LOSS):
        browser.wait_for(f"{panel} .cv-reading", "0.")
    # By keys, and said.
    browser.run("document.querySelector(arguments[0]).focus()", f"{LOSS} .cv-plot")
    browser.press(Key.RIGHT)
    browser.wait("words", lambda: any(" at 5" in t for t in browser.list_texts("[role=status]")))
    browser.click(".cv-key", "toy-00001")
    browser.wait_for(".rp-name", "toy-00001")


def test_what_curves_are_drawn_over(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_runs(root, template, 3)
    open_board(root)
    for axis, last in [("samples", "640"), ("epoch", "1"), ("time", "20s"), ("step", "20")]:
        browser.choose("select[aria-label='Horizontal axis']", axis)
        browser.wait(axis, partial(have_points_at, browser, last))
    browser.choose("select[aria-label='Horizontal axis']", "clock")
    browser.wait("clock", lambda: "2023-11-1" in next(iter(read_last_points(browser).values())))
    browser.choose("select[aria-label='Horizontal axis']", "step")
    browser.wait("step", partial(have_points_at, browser, "20"))
    # Logarithmic axes: of one chart, of all, and the horizontal one.
    linear = read_pixels(browser)
    browser.click("[aria-label='Logarithmic axis of loss']")
    browser.wait("one log axis", lambda: "logy=loss" in browser.url)
    browser.wait("drawn anew", lambda: read_pixels(browser) != linear)
    browser.click("[aria-label='Logarithmic vertical axes']")
    browser.click("[aria-label='Logarithmic horizontal axis']")
    browser.wait("log axes", lambda: "logx=1" in browser.url and "logy=1" in browser.url)
    # Smoothing keeps the points that were logged.
    browser.slide("[aria-label=Smoothing]", 0.8)
    browser.wait("smoothing", lambda: "smooth=0.8" in browser.url)
    browser.open(browser.url)
    browser.wait("curves", lambda: len(read_last_points(browser)) == 3)
    assert browser.run("return document.querySelector('[aria-label=Smoothing]').value") == "0.8"
    points = [p for p in read_points(browser, saved, "loss") if p["run"] == "toy-00002"]
    values, smoothed = ([float(p[key]) for p in points] for key in ("loss", "loss (smoothed)"))
    assert len(values) == 20
    assert max(smoothed) - min(smoothed) < 0.8 * (max(values) - min(values))
    # One metric of all, and large.
    browser.type("[aria-label='Search metrics']", "mae")
    browser.wait_until_gone(LOSS)
    assert browser.list_texts(".cv-grid figcaption b") == ["eval_mae"]
    browser.click("[aria-label='Enlarge eval_mae']")
    browser.wait_for(".cv-panel.cv-big")
    assert "big=eval_mae" in browser.url


def test_groups_have_bands(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_runs(root, template, 60)
    open_board(root)
    wait_for_count(browser, "60 runs")
    browser.click(".rt-bar button", "Group")
    browser.click("[role=menuitemcheckbox]", "All settings but the seed")
    browser.wait_for(".rt-foot", "in 12 groups")
    group = "hidden=256 lr=0.01 (5)"
    browser.wait("bands", lambda: group in read_last_points(browser))
    band = last_of(read_points(browser, saved, "loss"), group)
    with_bands = count_pixels(browser, f"{LOSS} canvas")
    browser.choose("select[aria-label='Band of a group']", "std")
    browser.wait("narrower", lambda: count_pixels(browser, f"{LOSS} canvas") < with_bands)
    narrow = last_of(read_points(browser, saved, "loss"), group)
    browser.choose("select[aria-label='Band of a group']", "none")
    browser.wait("no bands", lambda: "low" not in read_points(browser, saved, "loss")[0])
    browser.choose("select[aria-label='Band of a group']", "lines")
    browser.wait("lines", lambda: sum(group[:-4] in run for run in read_last_points(browser)) == 5)
    points = read_points(browser, saved, "loss")
    lines = [float(p["loss"]) for p in points if group[:-4] in p["run"] and p["step"] == "20"]
    assert len(lines) == 5
    assert float(band["loss"]) == pytest.approx(fmean(lines))
    assert float(band["low"]) == pytest.approx(min(lines))
    assert float(band["high"]) == pytest.approx(max(lines))
    assert float(band["low"]) < float(narrow["low"]) < float(narrow["high"]) < float(band["high"])
    browser.click(".rt-row", "hidden=256 lr=0.01")
    browser.wait("its runs", lambda: "toy-00059" in list_rows(browser)[:6])


def test_no_point_of_a_long_curve_is_lost(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_long_run(root, "long", template, lines=90_000)
    open_board(root, view="smooth=0.5")
    browser.wait("the curve", lambda: read_last_points(browser).get("long") == "90,000")
    points = read_points(browser, saved, "loss")
    assert len(points) < 5_000
    assert [p["step"] for p in points if float(p["loss"]) == 50] == ["30000"]
    browser.open(f"{browser.url}&zoom=29950_30050")
    browser.wait("the curve", lambda: len(read_last_points(browser)) == 1)
    browser.wait(
        "every point",
        lambda: (
            [float(p["step"]) for p in read_points(browser, saved, "loss")]
            == [*range(29_950, 30_051)]
        ),
    )


def test_scatter_and_bars(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_runs(root, template, 24)
    open_board(root)
    browser.click("[role=tab]", "Scatter")
    browser.wait_for("section[aria-label=Scatter] .cv-notes", "24 runs: eval_loss.best over hidden")
    browser.type("[aria-label='Across']", "eval_mae.last\n")
    browser.wait_for("section[aria-label=Scatter] .cv-notes", "eval_loss.best over eval_mae.last")
    browser.click("section[aria-label=Scatter] button", "log x")
    browser.wait("points", lambda: count_pixels(browser, ".sc-plot canvas") > 100)
    browser.run("document.querySelector('.sc-plot').focus()")
    browser.press(Key.RIGHT)
    browser.wait_for(".cv-tip", "eval_mae.last")
    name = browser.wait_for(".cv-tip b").text
    browser.click("section[aria-label=Scatter] button", "CSV")
    [file] = browser.wait("the table", lambda: list(saved.glob("*.csv")))
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert len(rows) == 24
    assert min(rows, key=lambda row: float(row["eval_mae.last"]))["run"] == name
    browser.run("document.querySelector('.sc-plot').focus()")
    browser.press(Key.RIGHT, "\n")
    browser.wait_for(".rp-name", "toy-")
    browser.driver.back()
    browser.click("[role=tab]", "Bars")
    browser.wait("bars", lambda: len(browser.list_texts(".sc-bars tr")) == 24)
    values = [float(text) for text in browser.list_texts(".sc-bars td.sc-number")]
    assert values == sorted(values)
    assert len(browser.list_texts(".sc-bars tr.sc-best")) == 1
    browser.choose("select[aria-label=Order]", "table")
    browser.wait("as in the table", lambda: browser.list_texts(".sc-bars th")[0] == "toy-00023")
    browser.click(".rt-bar button", "Group")
    browser.click("[role=menuitemcheckbox]", "lr")
    browser.wait(
        "groups", lambda: browser.list_texts(".sc-bars th") == ["lr=0.1 (9)", "lr=0.3 (15)"]
    )


def test_parallel_coordinates(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 60)
    open_board(root, view="panel=parallel")
    body = "section[aria-label='Parallel coordinates'] .pc-body"
    browser.wait("lines", lambda: count_pixels(browser, f"{body} canvas") > 500)
    assert browser.list_texts(".pc-name") == ["hidden", "lr", "seed", "eval_loss.best"]
    assert "correlation" in browser.list_texts(".pc-head small")[0]
    # A range is dragged along an axis, and another one typed.
    left = 56 / browser.wait_for(body).size["width"]
    browser.drag(body, (left, 0.5), (left, 0.05))
    browser.wait_for(".pc-view .cv-notes", "20 of 60 runs inside the ranges")
    browser.click(".pc-view summary", "Ranges as numbers")
    browser.type("[aria-label='from lr']", "0.05\t")
    browser.wait_for(".pc-view .cv-notes", "10 of 60 runs inside the ranges")
    assert "brush=" in browser.url
    browser.click("button", "Filter the table by this")
    wait_for_count(browser, "10 of 60 runs")
    assert any(text == "lr>=0.05" for text in browser.list_texts(".rt-chip"))
    browser.click("[aria-label='Take the axis seed away']")
    browser.wait_until_gone(".pc-name", "seed")


def test_media_over_steps(
    browser: Browser, open_board: OpenBoard, root: Path, trained: Path
) -> None:
    open_board(root, view="panel=media")
    for name in ("sample", "weights", "prompt"):
        browser.wait_for(f"section[aria-label={name}]")
    picture = "document.querySelector('section[aria-label=sample] img')"
    browser.wait_until_true(f"{picture}?.naturalWidth === 16")
    assert "at step 40" in browser.run(f"return {picture}.alt")
    browser.wait_for("section[aria-label=prompt]", "a sentence at step 40")
    browser.slide("[aria-label='Step of prompt']", 1)
    browser.wait_for("section[aria-label=prompt]", "a sentence at step 20")
    browser.slide("[aria-label='Step of sample']", 0)
    browser.wait_until_true(f"{picture}.alt.includes('at step 10') && {picture}.complete")
    weights = "section[aria-label=weights] canvas"
    browser.wait_until_true(f"document.querySelector('{weights}').ariaLabel.includes('4 steps')")
    browser.choose("[aria-label='How weights is drawn']", "single")
    browser.wait_until_true(f"document.querySelector('{weights}').ariaLabel.includes('256 values')")
    browser.choose("select[aria-label=Kind]", "text")
    browser.wait_until_gone("section[aria-label=weights]")
    browser.click("[aria-label='Play prompt']")
    browser.wait_for("section[aria-label=prompt]", "a sentence at step 40")
    browser.type("[aria-label='Search names']", "nothing")
    browser.wait_for(".md-view .cv-notes", "Nothing of this kind and name")
    browser.click("button[aria-label='Close the charts']")
    browser.wait_until_gone(".panel-pane")


def test_curves_are_saved_as_files(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    names = write_runs(root, template, 3)
    open_board(root)
    browser.wait("curves", lambda: len(read_last_points(browser)) == 3)
    image = save_chart(browser, saved, "loss", "PNG").read_bytes()
    assert image.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", image[16:24])
    assert width >= 800
    assert height >= 300
    drawing = ElementTree.fromstring(save_chart(browser, saved, "loss", "SVG").read_text())
    titles = {element.text for element in drawing.iter() if element.tag.endswith("title")}
    assert titles == {"loss", *names}
    points = read_points(browser, saved, "loss")
    assert {point["run"] for point in points} == set(names)
    lines = (root / names[0] / "metrics.jsonl").read_text().splitlines()
    logged = [line for line in lines if '"loss"' in line]
    assert len([point for point in points if point["run"] == names[0]]) == len(logged)
    browser.click("a.cv-button", "HTML")
    [page] = browser.wait("the page", lambda: list(saved.glob("*.html")))
    browser.open(page.as_uri())
    browser.wait_for("body", names[2])
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


def have_points_at(browser: Browser, last: str) -> bool:
    return set(read_last_points(browser).values()) == {last}


def measure_zoom(browser: Browser) -> float:
    low, high = read_zoom(browser) or (0, 0)
    return high - low


def read_pixels(browser: Browser) -> int:
    return count_pixels(browser, f"{LOSS} canvas")


def last_of(points: list[dict[str, str]], run: str) -> dict[str, str]:
    return [point for point in points if point["run"] == run][-1]
