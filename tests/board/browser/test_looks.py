"""How the board looks and is used: dark and light, on a phone, by keyboard, with a screen reader;
and that what a run says is text, whatever it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from board_pages import (
    LOSS,
    SEARCH,
    OpenBoard,
    count_pixels,
    list_rows,
    read_last_points,
    wait_for_count,
    wait_for_rows,
)
from board_runs import RunTemplate, write_run, write_runs
from board_sweeps import make_sweep, run_trials
from browser import Browser, Key
from page_checks import find_cut_off, find_nameless, find_out_of_reach, find_pale_texts
from run_folders import lines, make_run

from echelon.utils.files import read_json_object, write_json_atomically

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

VIEWS = {
    "": ".cv-key",
    "panel=scatter&group=-seed": ".sc-plot canvas",
    "panel=bars": ".sc-bars tr",
    "panel=parallel": ".pc-head",
    "page=sweeps": ".sw-link",
    "page=sweep&sweep=0:s": ".sw-row .sw-link",
    "page=machines": ".mc-gpu",
    "page=run&run=0:paced": ".rp-card",
    "page=run&run=0:paced&tab=curves": ".u-over",
    "page=run&run=0:paced&tab=settings&with=0:toy-00000": ".rp-theirs",
    "page=run&run=0:paced&tab=timeline": ".tl-mark",
    "page=run&run=0:paced&tab=logs": ".lv-row",
    "page=run&run=0:paced&tab=snapshots": ".rp-snapshots td",
    "page=run&run=0:paced&tab=media": ".md-picture",
}
"""All kinds of views, and what is there once they are drawn."""
ATTACK = "<img src=x onerror=document.body.remove()>"


def test_every_view_for_everybody(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, trained: Path
) -> None:
    """With names, in reach of the keyboard, with contrast in light and dark, on a phone, and of
    nothing that is fetched from elsewhere."""
    assert trained.exists()
    write_runs(root, template, 12)
    run_trials(make_sweep(root), 9)
    for number in range(9):
        make_run(root, f"s-{number}", lines(), status={"step": 40}, lr=0.1 * (number + 1))
    board = open_board(root)
    faults: list[str] = []
    for view, css in VIEWS.items():
        browser.open(f"http://{board.host}/?{view}")
        browser.wait_for(css)
        found = [*find_nameless(browser), *find_out_of_reach(browser)]
        for scheme in ("dark", "light"):
            browser.set_scheme(scheme)
            browser.wait_until_true(
                "document.documentElement.dataset.theme === arguments[0]", scheme
            )
            found += [f"{scheme}: {each}" for each in find_pale_texts(browser)]
        browser.set_size(390, 844)
        found += find_cut_off(browser)
        browser.command("Emulation.clearDeviceMetricsOverride")
        entries = "performance.getEntriesByType('resource').map((entry) => entry.name)"
        found += [
            f"fetched: {name}"
            for name in browser.run(f"return {entries}")
            if not name.startswith((f"http://{board.host}/", "data:", "blob:"))
        ]
        faults += [f"{view}: {each}" for each in found]
    assert not faults, "\n".join(faults)


def test_dark_and_light(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3)
    open_board(root)
    browser.wait("curves", lambda: count_pixels(browser, f"{LOSS} canvas") > 100)
    assert measure_ground(browser) > 200
    browser.set_scheme("dark")
    browser.wait_for("[data-theme=dark] body")
    assert measure_ground(browser) < 60
    key = "return document.querySelector('.cv-key line').getAttribute('stroke')"
    browser.wait("its shade", lambda: browser.run(key))
    dark = browser.run(key)
    for label, theme in [("light", "light"), ("dark", "dark"), ("as the system", "dark")]:
        browser.click("button[aria-label^='Theme']")
        browser.wait_for(f"button[aria-label='Theme: {label}']")
        browser.wait_for(f"[data-theme={theme}] body")
    browser.click("button[aria-label^='Theme']")
    browser.wait_for("[data-theme=light] body")
    browser.wait("another shade", lambda: browser.run(key) != dark)
    browser.open(browser.url)
    browser.wait_for("button[aria-label='Theme: light']")
    assert measure_ground(browser) > 200, "what was chosen is kept"


def test_with_nothing_but_keys(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    names = write_runs(root, template, 12)
    open_board(root)
    wait_for_count(browser, "12 runs")
    browser.press("g", "m")
    browser.wait_for(".mc-host-name")
    browser.press("g", "s")
    browser.wait_for(".sw h2", "Sweeps")
    browser.press("g", "r")
    wait_for_count(browser, "12 runs")
    browser.press("?")
    browser.wait_for("dialog", "search and filter")
    browser.press(Key.ESCAPE)
    browser.wait_until_gone("dialog")
    browser.press("/")
    browser.press(*"hidden=64", "\n")
    wait_for_count(browser, "5 of 12 runs")
    browser.press(Key.ESCAPE)
    browser.run("document.querySelector('.rt-scroll').focus()")
    browser.press(Key.HOME, Key.DOWN, "o")
    second = names[8]
    browser.wait("one curve", lambda: list(read_last_points(browser)) == [second])
    browser.press("\n")
    browser.wait_for(".rp-name", second)
    browser.driver.back()
    wait_for_count(browser, "5 of 12 runs")
    browser.run("document.querySelector('.rt-scroll').focus()")
    browser.press(Key.HOME, Key.UP, Key.RIGHT, "\n")
    browser.wait("sorted by a title", lambda: "sort=" in browser.url)
    browser.press("m")
    browser.wait_for("[role=menu]")
    browser.press(Key.DOWN, Key.ESCAPE)
    browser.wait_until_gone("[role=menu]")


def test_the_address_is_the_view(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 60)
    open_board(root)
    browser.type(SEARCH, "lr<0.1\n")
    wait_for_count(browser, "30 of 60 runs")
    browser.click(".rt-h", "Best loss")
    browser.wait("sorted", lambda: "sort=best" in browser.url)
    browser.press("p")
    browser.click("[role=tab]", "Bars")
    browser.wait("bars", lambda: len(browser.list_texts(".sc-bars tr")) == 30)
    rows, bars = list_rows(browser), browser.list_texts(".sc-bars th")
    other = browser.open_window(browser.url)
    browser.wait("as there", lambda: browser.list_texts(".sc-bars th") == bars)
    wait_for_rows(browser, *rows)
    browser.switch_to(browser.home)
    browser.driver.back()
    browser.wait_for("[role=tab][aria-selected=true]", "Curves")
    browser.driver.back()
    browser.wait("as before", lambda: "sort=" not in browser.url)
    browser.switch_to(other)


def test_what_a_run_says_is_text(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, trained: Path
) -> None:
    names = ["<script>document.body.remove()<", ATTACK, "\x1b[31mred", "x" * 250, "\u202etxt.exe"]
    for number, name in enumerate(names):
        run = write_run(root, name, template, {"kind": ATTACK}, began=1_800_000_000.0 + number)
        failure = {"summary": ATTACK, "detail": f"\x1b]0;x\x07{ATTACK}"}
        status = {"state": "failed", "failure": failure}
        write_json_atomically(run.status_file, (read_json_object(run.status_file) or {}) | status)
        line = {"step": 21, "epoch": 2, "samples": 9, "time": 1.0, ATTACK: 1.0, "m" * 3000: 2.0}
        with run.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = {"tags": [ATTACK[:40], "y" * 50], "note": f"{ATTACK}\n{'z' * 2_000_000}"}
        (run.folder / "annotations.json").write_text(json.dumps(said))
        log = f"{ATTACK}\x1b[2J\x1b[31m\u202e\n{'w' * 10**7}\n"
        (run.logs_folder / "rank-0.log").write_text(log)
    shutil.copytree(trained, root / f"media{ATTACK}")
    board = open_board(root)
    wait_for_count(browser, "7 runs")
    assert {"<script>document.body.remove()<", ATTACK, "x" * 250} <= {*list_rows(browser)}
    browser.wait("curves", lambda: len(read_last_points(browser)) >= 5)
    for panel in ("Bars", "Scatter", "Parallel", "Media"):
        browser.click("[role=tab]", panel)
        browser.wait_for("[role=tab][aria-selected=true]", panel)
    browser.wait_for(".md-picture")
    browser.click(".rt-row a", ATTACK)
    browser.wait_for(".rp-name", ATTACK)
    browser.wait_for(".rp-failure", ATTACK)
    assert len(browser.wait_for(".rp-note").text) < 2_000, "the rest comes by a button"
    browser.click("[role=tab]", "Settings")
    browser.wait_for(".rp-setting-table td", ATTACK)
    browser.click("[role=tab]", "Time line")
    browser.wait_for(".tl-list td")
    browser.click("[role=tab]", "Logs")
    browser.type("[aria-label='Go to line']", "1\n")
    browser.wait_for(".lv-row", f"{ATTACK}^[[2J⟨RLO⟩")
    browser.wait_for(".lv-more", "more characters")
    browser.open(f"http://{board.host}/?q={ATTACK}&filter={ATTACK}&panel={ATTACK}&sort={ATTACK}")
    browser.wait_for(".rt-chip", ATTACK)
    browser.set_size(390, 844)
    assert find_cut_off(browser) == []
    assert browser.run("return document.querySelectorAll('[src=x], [onerror]').length") == 0


def measure_ground(browser: Browser) -> float:
    """How light the page is, from 0 to 255."""
    colour = browser.run("return getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour[4:-1].split(",")) / 3
