"""The page of runs in a real browser: its table, its charts, and what changes while one looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from board_pages import (
    LOSS,
    SEARCH,
    OpenBoard,
    count_pixels,
    list_rows,
    read_cell,
    read_last_points,
    wait_for_count,
    wait_for_rows,
)
from board_runs import RunTemplate, write_runs
from browser import Browser, Key

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_the_table_and_the_curves_appear(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 60)
    open_board(root)
    wait_for_count(browser, "60 runs")
    wait_for_rows(browser, *reversed(names[-15:]))
    assert read_cell(browser, "toy-00053", "State") == "failed"
    assert read_cell(browser, "toy-00059", "Step") == "20"
    shown = {name: "20" for name in names[-10:]}
    browser.wait("ten curves", lambda: read_last_points(browser) == shown)
    assert count_pixels(browser, f"{LOSS} canvas") > 500
    assert browser.find(".live", "live")
    assert len(browser.list_texts(".cv-key")) == 10


def test_filters_and_words(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 60)
    open_board(root)
    wait_for_count(browser, "60 runs")
    browser.type(SEARCH, "lr=0.3 state=finished\n")
    wait_for_count(browser, "14 of 60 runs")
    assert browser.list_texts(".rt-chip") == ["lr=0.3", "state=finished"]
    browser.click("button[aria-label='Remove state=finished']")
    wait_for_count(browser, "15 of 60 runs")
    browser.type(SEARCH, "0001")
    wait_for_count(browser, "6 of 60 runs")
    browser.type(SEARCH, "lrr>1\n")
    browser.wait_for(".rt-fault", "lrr")
    assert "lr" in browser.wait_for(".rt-fault span").text
    browser.open(browser.url)
    browser.wait_for(".rt-fault", "lrr")
    browser.click("button", "Clear all")
    wait_for_count(browser, "60 runs")


def test_the_order_of_rows(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 20)
    open_board(root)
    wait_for_count(browser, "20 runs")
    browser.click(".rt-h", "Run")
    wait_for_rows(browser, *names[:5])
    browser.click(".rt-h", "Run")
    wait_for_rows(browser, *names[:-6:-1])
    browser.click(".rt-h", "Best loss")
    browser.wait("the best first", lambda: "sort=best" in browser.url)
    losses = [float(read_cell(browser, name, "Best loss")) for name in list_rows(browser)[:10]]
    assert losses == sorted(losses)
    best = list_rows(browser)[0]
    browser.driver.back()
    browser.wait("as before", lambda: list_rows(browser)[0] == names[-1])
    browser.driver.forward()
    browser.wait("and again", lambda: list_rows(browser)[0] == best)


def test_notes_and_tags_are_kept_in_the_run(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3)
    open_board(root)
    wait_for_count(browser, "3 runs")
    browser.click(".rt-scroll")
    browser.press("t")
    browser.type("[aria-label='New tag']", "good\n", "paper\n")
    browser.type("textarea[aria-label=Note]", "the one to keep")
    browser.click("button.primary", "Save")
    file = root / "toy-00002" / "annotations.json"
    browser.wait("the file", file.exists)
    said = json.loads(file.read_text())
    assert (said["tags"], said["note"]) == (["good", "paper"], "the one to keep")
    browser.wait_for(".rt-row", "the one to keep")
    browser.wait_for(".rt-row", "paper")
    file.write_text(json.dumps({"tags": ["other"], "note": "from a shell"}))
    browser.wait_for(".rt-row", "from a shell")


def test_columns_and_views_are_saved(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 12)
    board = open_board(root)
    wait_for_count(browser, "12 runs")
    browser.click(".rt-bar button", "Columns")
    browser.click(".columns-list label", "trainer.clip")
    browser.wait_for(".rt-h", "clip")
    browser.click(".columns-list label", "hidden")
    browser.wait_until_gone(".rt-h", "hidden")
    browser.press(Key.ESCAPE)
    browser.click(".rt-h", "Run")
    wait_for_rows(browser, *names[:5])
    url = browser.url
    browser.click(".rt-bar button", "Views")
    browser.type("[aria-label='Name of this view']", "by name\n")
    browser.wait_for("#toasts", "by name")
    browser.open(board.url)
    browser.wait_for(".rt-h", "hidden")
    browser.click(".rt-bar button", "Views")
    browser.click(".views-name", "by name")
    wait_for_rows(browser, *names[:5])
    assert browser.url == url
    browser.open(url)
    browser.wait_for(".rt-h", "clip")
    wait_for_rows(browser, *names[:5])
    assert not browser.find(".rt-h", "hidden")


def test_runs_are_pinned_hidden_and_chosen(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 30)
    open_board(root)
    wait_for_count(browser, "30 runs")
    browser.hover(".rt-row", names[-1])
    browser.click(".rt-row button[aria-label='Menu of the run']")
    browser.click("[role=menuitem]", "Hide")
    wait_for_count(browser, "29 of 30 runs")
    wait_for_rows(browser, names[-2])
    browser.press(Key.DOWN, Key.DOWN, "p")
    wait_for_rows(browser, names[-4], names[-2])
    colour = "return document.querySelector('.cv-key line').getAttribute('stroke')"
    before = browser.run(colour)
    browser.press("o")
    browser.wait("one curve", lambda: list(read_last_points(browser)) == [names[-4]])
    assert browser.run(colour) == before
    browser.open(browser.url)
    browser.wait("one curve", lambda: list(read_last_points(browser)) == [names[-4]])
    wait_for_rows(browser, names[-4], names[-2])
    browser.click(".rt-foot button", "show")
    wait_for_count(browser, "30 runs")


def test_ten_thousand_runs(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 10_000, points=1)
    open_board(root)
    wait_for_count(browser, "10,000 runs")
    wait_for_rows(browser, *reversed(names[-5:]))
    assert len(browser.list_texts(".rt-body .rt-row")) < 100, "only those in sight"
    browser.click(".rt-scroll")
    browser.press(Key.END)
    browser.wait("the last row", lambda: names[0] in list_rows(browser))
    browser.type(SEARCH, "name=toy-0777*\n")
    wait_for_count(browser, "10 of 10,000 runs")


def test_the_token_is_asked_for(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 1)
    board = open_board(root)
    wait_for_count(browser, "1 run")
    assert "token" not in browser.url
    browser.allow("status of 401")
    browser.command("Network.clearBrowserCookies")
    browser.open(f"http://{board.host}/")
    browser.wait_for("input[name=token]")
    browser.type("input[name=token]", board.token, "\n")
    wait_for_count(browser, "1 run")


def test_the_theme_is_that_of_the_system_until_one_is_chosen(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3)
    light, dark = "rgb(255, 255, 255)", "rgb(16, 18, 21)"
    line = "document.querySelector('.cv-key line').getAttribute('stroke')"

    def wait_for_background(wanted: str) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        browser.wait_until_true(f"{colour} === arguments[0]", wanted)

    open_board(root)
    wait_for_rows(browser, "toy-00002")
    wait_for_background(light)
    browser.wait_for(".cv-key line")
    before = browser.run(f"return {line}")
    browser.set_scheme("dark")
    wait_for_background(dark)
    browser.wait_until_true(f"{line} !== arguments[0]", before)
    browser.click("button[aria-label='Theme: as the system']")
    wait_for_background(light)
    browser.click("button[aria-label='Theme: light']")
    wait_for_background(dark)
    browser.set_scheme("light")  # it was chosen
    browser.open(browser.url)
    wait_for_rows(browser, "toy-00002")
    wait_for_background(dark)
    browser.click("button[aria-label='Theme: dark']")
    wait_for_background(light)
