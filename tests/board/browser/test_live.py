"""What changes while one looks: trainings, folders, the server, and another page."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from board_pages import (
    PACED,
    OpenBoard,
    read_cell,
    read_last_points,
    wait_for_count,
    wait_for_rows,
)
from board_runs import RunTemplate, write_run, write_runs
from board_server import run_board
from browser import Browser
from command_runner import ECHELON, free_port
from worlds import started_forked

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_a_real_training_is_followed(
    browser: Browser, open_board: OpenBoard, root: Path, tmp_path: Path
) -> None:
    open_board(root)
    browser.wait_for("h2", "No runs yet")
    pace = tmp_path / "pace"
    pace.write_text("3")
    words = [*ECHELON, *PACED, "run.name=live", "trainer.steps=20"]
    with started_forked(words, tmp_path, ECHELON_TEST_PACE=str(pace)) as training:
        browser.wait("step 3", lambda: "3/20" in read_cell(browser, "live", "Step"))
        assert read_cell(browser, "live", "State") == "running"
        browser.wait("its points", lambda: read_last_points(browser).get("live") == "3")
        pace.write_text("7")
        browser.wait("step 7", lambda: "7/20" in read_cell(browser, "live", "Step"))
        browser.wait("its points", lambda: read_last_points(browser).get("live") == "7")
        pace.write_text("20")
        browser.wait("its end", lambda: read_cell(browser, "live", "State") == "finished")
        browser.wait("its points", lambda: read_last_points(browser).get("live") == "20")
        assert training.wait().code == 0


def test_runs_come_and_go(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3)
    open_board(root, view="page=run&run=0:toy-00001")
    browser.allow("status of 404")
    browser.wait_for(".rp-name", "toy-00001")
    browser.wait_for(".rp-cards", "Results")
    shutil.rmtree(root / "toy-00001")
    browser.wait_for(".rp-problem", "not there any more")
    assert browser.find(".rp-cards", "Results"), "what was known of it stays"
    browser.click("button[aria-label='Back to all runs']")
    wait_for_count(browser, "2 runs")
    write_run(root, "newer", template, began=1_800_000_000.0)
    wait_for_rows(browser, "newer")
    shutil.rmtree(root / "newer")
    wait_for_count(browser, "2 runs")
    browser.wait("its curve", lambda: set(read_last_points(browser)) == {"toy-00000", "toy-00002"})


def test_a_server_that_is_killed_and_started_again(
    browser: Browser, root: Path, template: RunTemplate, tmp_path: Path
) -> None:
    browser.allow("net::ERR_|Failed to fetch")
    write_runs(root, template, 3)
    words = [str(root), "--port", str(free_port())]
    with run_board(*words, cache=tmp_path / "cache") as board:
        browser.open(board.url)
        wait_for_count(browser, "3 runs")
        browser.wait("curves", lambda: len(read_last_points(browser)) == 3)
        browser.click(".rt-scroll")
        browser.press("t")
        browser.type("[aria-label='New tag']", "again\n")
        board.stop(signal.SIGKILL)
    # 1. What is known stays, and what was typed; and it goes on with the next server.
    browser.wait_for("#banner", "does not answer")
    browser.wait_for(".live", "offline")
    browser.click("button.primary", "Save")
    browser.wait_for(".form-error", "does not answer")
    write_run(root, "meanwhile", template, began=1_800_000_000.0)
    with run_board(*words, cache=tmp_path / "cache") as board:
        wait_for_rows(browser, "meanwhile", "toy-00002")
        browser.wait_until_gone("#banner")
        browser.wait_for(".live", "live")
        browser.wait("its curve", lambda: "meanwhile" in read_last_points(browser))
        browser.click("button.primary", "Save")
        browser.wait_for(".rt-row", "again")
        board.stop(signal.SIGKILL)
    # 2. A part that could not be had then is there too.
    browser.wait_for("#banner", "does not answer")
    browser.click("[role=tab]", "Media")
    browser.wait_for(".panel-pane h2", "could not be loaded")
    with run_board(*words, cache=tmp_path / "cache"):
        browser.wait_for("section[aria-label=Media] .cv-notes", "have logged no images")
        browser.wait_for(".live", "live")
        browser.leave_pages()


def test_two_pages_at_once(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 3)
    board = open_board(root)
    wait_for_count(browser, "3 runs")
    other = browser.open_window(f"{board.url}&page=run&run=0:toy-00001")
    browser.type("[aria-label='Add a tag']", "seen\n")
    browser.wait_for(".rp-tag", "seen")
    browser.switch_to(browser.home)
    browser.wait_for(".rt-row", "seen")
    write_run(root, "newer", template, began=1_800_000_000.0)
    wait_for_rows(browser, "newer")
    browser.switch_to(other)
    browser.click("nav a", "Runs")
    wait_for_rows(browser, "newer")
