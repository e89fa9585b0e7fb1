"""Acting on runs from the page: with --act after a plan is confirmed, and not at all without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_pages import OpenBoard, read_cell, wait_for_rows
from browser import Browser, Key

from echelon.jobs.cancel import cancel_runs
from echelon.runs.find import list_runs
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

ACTIONS = ("Stop", "Cancel", "Resume", "Requeue", "Submit again")


@pytest.fixture
def _ended(root: Path) -> Iterator[None]:
    """No training that was started outlives the test."""
    yield
    for run in list_runs(root):
        if read_run_status(run).is_active:
            with contextlib.suppress(OSError):
                cancel_runs([run], now=True)


@pytest.mark.usefixtures("_ended")
def test_a_training_is_begun_stopped_resumed_and_cancelled(
    browser: Browser, open_board: OpenBoard, root: Path, trained: Path
) -> None:
    open_board(root, ["--act"], view="page=run&run=0:paced")
    # 1. Begun again with a changed setting: the plan comes first, and says what is wrong.
    browser.click(".rp-acts button", "Submit again")
    browser.type("[aria-label=Setting]", "trainer.stepz", Key.TAB, "200000")
    browser.wait_for(".ac-plan [role=alert]", "cannot be done")
    assert "there is no such setting" in browser.wait_for(".ac-plan pre").text
    assert not browser.wait_for("dialog button", "Submit it").is_enabled()
    browser.type("[aria-label=Setting]", "trainer.steps")
    typed = f"echelon train --like {trained} trainer.steps=200000"
    browser.wait_for(".ac-plan:not(.ac-stale) code", typed)
    assert "launch=inline" in browser.wait_for(".ac-plan pre").text
    assert [run.name for run in list_runs(root)] == ["paced"], "nothing was done yet"
    browser.click("dialog button:enabled", "Submit it")
    browser.wait_for(".ac-ok", "It was started, and runs")
    browser.click("dialog button", "Open the new run")
    [new] = [run for run in list_runs(root) if run.name != "paced"]
    browser.wait_for(".rp-name", new.name)
    browser.wait_for(".rp-badge", "running")
    # 2. Stopped: it saves. A dialog that is closed does nothing.
    browser.click(".rp-acts button", "Cancel")
    browser.wait_for("dialog .rp-danger:enabled", "Cancel it")
    browser.press(Key.ESCAPE)
    browser.wait_until_gone("dialog")
    assert read_run_status(new).is_active
    browser.click(".rp-acts button", "Stop")
    browser.wait_for(".ac-plan pre", "would be asked to save and end")
    browser.click("dialog .rp-danger:enabled", "Stop it")
    browser.wait_for(".ac-ok", "Done")
    browser.wait("its end", lambda: not read_run_status(new).is_active)
    step = new.find_newest_step()
    assert step > 0
    browser.click("dialog button", "Close")
    browser.wait_for(".rp-badge", "cancelled")
    # 3. From the table: resumed, and cancelled.
    browser.click("[aria-label='Back to all runs']")
    wait_for_rows(browser, new.name, "paced")
    act_in_table(browser, new, "Resume")
    browser.wait_for(".ac-plan code", f"echelon resume {new.folder}")
    browser.click("dialog .rp-primary:enabled", "Resume it")
    browser.wait_for(".ac-ok", "It was started, and runs")
    browser.click("dialog button", "Close")
    browser.wait("it runs", lambda: read_cell(browser, new.name, "State") == "running")
    act_in_table(browser, new, "Cancel")
    browser.click("dialog .rp-danger:enabled", "Cancel it")
    browser.wait_for(".ac-ok", "Done")
    browser.wait("its end", lambda: not read_run_status(new).is_active)
    browser.click("dialog button", "Close")
    browser.wait("and so it says", lambda: read_cell(browser, new.name, "State") != "running")
    assert new.find_newest_step() >= step


def test_without_act_only_tags_and_notes_are_changed(
    browser: Browser, open_board: OpenBoard, root: Path, trained: Path
) -> None:
    before = read_files(root)
    open_board(root, view="page=run&run=0:paced")
    browser.wait_for(".rp-commands", "echelon resume")
    for tab in browser.list_texts("[role=tab]"):
        browser.click("[role=tab]", tab)
    assert not any(browser.find("button", action) for action in ACTIONS)
    browser.click("[aria-label='Back to all runs']")
    browser.hover(".rt-row", "paced")
    browser.click("[aria-label='Menu of the run']")
    browser.wait_for("[role=menuitem]", "Copy the folder")
    assert not any(browser.find("[role=menuitem]", action) for action in ACTIONS)
    # Nor by a script in the page.
    post = """
        const { token } = await (await fetch("/api/hello")).json();
        const headers = { "Content-Type": "application/json", "X-Echelon-Token": token };
        const body = JSON.stringify({ action: "cancel", runs: ["0:paced"], confirm: true });
        return (await fetch("/api/act", { method: "POST", headers, body })).status;"""
    browser.allow("status of 403")
    assert browser.run(post) == 403
    browser.press(Key.ESCAPE, "t")
    browser.type("[aria-label='New tag']", "kept\n")
    browser.click("button.primary", "Save")
    browser.wait_for(".rt-row", "kept")
    after = read_files(root)
    assert after.keys() - before.keys() == {"paced/annotations.json"}
    assert {name: after[name] for name in before} == before


def act_in_table(browser: Browser, run: Run, action: str) -> None:
    browser.hover(".rt-row", run.name)
    browser.click(".rt-row button[aria-label='Menu of the run']")
    browser.click("[role=menuitem]", action)


def read_files(root: Path) -> dict[str, bytes]:
    """All files below a folder but hidden ones: locks, and the index of the board itself."""
    files = [path for path in root.rglob("*") if path.is_file()]
    named = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return {name: data for name, data in named.items() if "/." not in f"/{name}"}
