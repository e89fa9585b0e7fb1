"""The page of one run in a real browser: results, settings, time line, snapshots, logs, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from board_pages import OpenBoard, read_last_points
from board_runs import RunTemplate, write_runs
from browser import Browser, Key
from run_folders import STARTED, lines, make_run, write_phases

from echelon.runs.history import BadMachine, RoundRecord, record_bad_machine, record_round
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_what_a_training_left(
    browser: Browser, open_board: OpenBoard, root: Path, trained: Path, saved: Path
) -> None:
    run = Run(trained)
    (run.snapshots_folder / "best").symlink_to("step-000000024")
    run.traces_folder.mkdir()
    (run.traces_folder / "rank-0.json.gz").write_bytes(b"a trace")
    open_board(root, view="page=run&run=0:paced")
    # 1. What is known at a glance, and commands to copy.
    browser.wait_for(".rp-name", "paced")
    browser.wait_for(".rp-progress-text", "step 40 of 40")
    browser.wait_for(".rp-card dd", "paced_training.py")
    titles = browser.list_texts(".rp-card h3")
    assert {"Results", "Speed of a step", "Time", "Machines", "Code", "Environment"} <= {*titles}
    browser.click("[aria-label='Copy the command: go on']")
    browser.wait_for("[aria-label='Copy the command: go on']", "Copied")
    assert browser.read_clipboard() == f"echelon resume {run.folder}"
    # 2. Snapshots.
    browser.click("[role=tab]", "Snapshots3")
    browser.wait("all", lambda: len(browser.list_texts(".rp-snapshots tbody tr")) == 3)
    assert browser.list_texts(".rp-snapshots tbody th") == ["40", "32", "24"]
    rows = browser.list_texts(".rp-snapshots tbody tr")
    assert ["★ best" in row for row in rows] == [False, False, True]
    assert all("kB" in row for row in rows)
    command = f"echelon resume {run.folder} trainer.resume={run.snapshots_folder}/step-000000024"
    browser.click(f".rp-snapshots button[title='{command}']")
    browser.wait_for(".rp-snapshots button", "Copied")
    assert browser.read_clipboard() == command
    # 3. Curves, media, traces and the plan.
    browser.press(Key.ESCAPE)
    browser.click("[role=tab]", "Curves")
    browser.wait("its curve", lambda: read_last_points(browser) == {"paced": "40"})
    browser.click("[role=tab]", "Media")
    browser.wait_for("section[aria-label=prompt]", "a sentence at step 40")
    browser.click("[role=tab]", "Traces1")
    browser.click("a.rp-button", "Download")
    [file] = browser.wait("the trace", lambda: list(saved.glob("*.json.gz")))
    assert file.read_bytes() == b"a trace"
    browser.click("[role=tab]", "Plan")
    browser.wait_for("pre[aria-label=Plan]", "launch=inline")
    # 4. By keys from tab to tab, and back to all runs.
    browser.press(Key.HOME)
    browser.wait_for("#rp-tab-overview[aria-selected=true]")
    browser.wait_for(".rp-card h3", "Results")


def test_tags_and_a_note_on_the_page_of_a_run(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 1)
    open_board(root, view="page=run&run=0:toy-00000")
    file = root / "toy-00000" / "annotations.json"
    browser.type("[aria-label='Add a tag']", "good, paper\n")
    browser.wait_for(".rp-tag", "paper")
    browser.click("[aria-label='Remove the tag good']")
    browser.wait_until_gone(".rp-tag", "good")
    browser.click("[aria-label='Write a note']")
    browser.type("textarea[aria-label=Note]", "of two\nlines", Key.CONTROL + "\n")
    browser.wait_for(".rp-note-text", "of two")
    said = json.loads(file.read_text())
    assert (said["tags"], said["note"]) == (["paper"], "of two\nlines")


def test_the_settings_of_two_runs(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate
) -> None:
    write_runs(root, template, 60)
    open_board(root, view="page=run&run=0:toy-00000")
    browser.click("[role=tab]", "Settings")
    browser.wait_for(".rp-setting-table th", "trainer.batch_size")
    browser.type("[aria-label='Search settings']", "hidden")
    browser.wait("one", lambda: len(browser.list_texts(".rp-setting-table tbody tr")) == 1)
    assert "16" in browser.list_texts(".rp-setting-table tbody td")[0]
    browser.type("[aria-label='Search settings']", Key.BACKSPACE)
    browser.click(".rp-check", "only what is not the default")
    browser.wait_until_gone(".rp-setting-table th", "trainer.compile")
    browser.type("[aria-label='Compare with another run']", "toy-00059")
    browser.wait_for(".rp-compared h3", "3 settings differ")
    differing = browser.list_texts(".rp-compared tbody tr")
    assert differing == ["hidden16256", "lr0.30.01", "seed04"]
    browser.open(browser.url)
    browser.wait("as before", lambda: browser.list_texts(".rp-compared tbody tr") == differing)
    browser.click("[aria-label='End the comparison']")
    browser.wait_until_gone(".rp-compared tbody tr")


def test_faults_and_restarts_on_the_time_line(
    browser: Browser, open_board: OpenBoard, root: Path
) -> None:
    failure = {"rank": 2, "host": "b", "step": 30, "summary": "OSError: the disk is full"}
    failure["detail"] = "Traceback:\n\x1b[31mOSError\x1b[0m: the disk is full\n"
    run = make_run(root, "a", lines(), status={"state": "failed", "failure": failure})
    write_phases(run, (STARTED, STARTED + 20, 0, 20), (STARTED + 30, None, 20, 40))
    lost = RoundRecord(STARTED + 33, 1, 3, 23, 2.0, 0.1, (2,), (), "killed by SIGKILL", ("b",))
    record_round(run, lost)
    record_bad_machine(run, BadMachine(STARTED + 35, "b", "2 faults", 25, True, "c"))
    (run.logs_folder / "hang-20231114-221500.txt").write_text("rank 0 stands here\n")
    open_board(root, view="page=run&run=0:a")
    browser.wait_for(".rp-failure", "OSError: the disk is full")
    assert "\x1b" not in browser.wait_for(".rp-failure pre").text
    browser.click(".rp-hangs summary", "hang-20231114")
    browser.wait_for(".rp-hangs pre", "rank 0 stands here")
    browser.click("[role=tab]", "Time line")
    browser.wait_for(".tl-list tr", "killed by SIGKILL; stood still for 2.0 s")
    assert browser.find(".tl-list tr", "c took over")
    kinds = browser.list_texts(".tl .lv-chip")
    assert {"start 2", "stop 1", "lost 1", "machine 1", "hang 1"} <= {*kinds}
    assert len(browser.list_texts(".tl-phase")) == 2
    browser.click(".tl .lv-chip", "start 2")
    browser.wait_until_gone(".tl-list .tl-kind", "start")
    whole = browser.wait_for(".tl-span").text
    browser.click("[aria-label='Zoom in']")
    browser.wait("nearer", lambda: browser.wait_for(".tl-span").text != whole)
    browser.click("[aria-label='Show all of it']")
    browser.wait("all of it", lambda: browser.wait_for(".tl-span").text == whole)
    browser.run("document.querySelector('.tl-list tr[data-i]').focus()")
    browser.press(Key.DOWN, "\n")
    browser.wait_for(".tl-list tr.tl-chosen")
    assert browser.run("return document.querySelectorAll('.tl-mark.tl-chosen').length") == 1


def test_logs(
    browser: Browser, open_board: OpenBoard, root: Path, template: RunTemplate, saved: Path
) -> None:
    write_runs(root, template, 1)
    logs = root / "toy-00000" / "logs"
    colours = "\x1b[32mgreen\x1b[0m \x1b[1;31mbold red\x1b[0m \x1b[2J <b>text</b>"
    texts = [f"line {n}" for n in range(1, 60_001)]
    texts[29_999] = colours
    texts[99] = "x" * 5_000
    (logs / "rank-0.log").write_text("\n".join(texts) + "\n")
    open_board(root, view="page=run&run=0:toy-00000&tab=logs")
    # 1. It opens at the end, with only the lines that are seen, and goes on as they are written.
    browser.wait_for(".lv-row", "line 60000")
    browser.wait_for(".lv-foot", "60,000 lines")
    assert len(browser.list_texts(".lv-row")) < 150
    with (logs / "rank-0.log").open("a") as file:
        file.write("and one more\n")
    browser.wait_for(".lv-row", "and one more")
    # 2. Colours are shown, and nothing else is obeyed.
    browser.type("[aria-label='Go to line']", "30000\n")
    browser.wait_for(".lv-row", "bold red")
    red = browser.wait_for(".lv-row .lv-bold", "bold red")
    style = "const s = getComputedStyle(arguments[0]); return [s.color, s.fontWeight]"
    colour, weight = browser.run(style, red)
    channels = [int(part) for part in colour[4:-1].split(",")]
    assert channels[0] > channels[1] + 50
    assert int(weight) >= 600
    assert browser.find(".lv-row", "^[[2J <b>text</b>")
    assert browser.wait_for("[aria-pressed=false]", "Follow")
    # 3. Search, forth and back, by words and by patterns.
    browser.type("[aria-label='Search in logs']", "LINE 4242")
    browser.wait_for(".lv-found", "of 11")
    browser.wait_for(".lv-row.lv-match mark", "line 4242")
    seen: Callable[[], str] = lambda: browser.wait_for(".lv-found").text  # noqa: E731
    before = seen()
    browser.press("\n")
    browser.wait("the next one", lambda: seen() != before)
    browser.click("[aria-label^='Previous match']")
    browser.wait("and back", lambda: seen() == before)
    browser.type("[aria-label='Search in logs']", r"^line [12]{5}$")
    browser.click("[aria-label='Regular expression']")
    browser.wait_for(".lv-found", "of 32")
    assert "regex=1" in browser.url
    browser.type("[aria-label='Search in logs']", "(")
    browser.wait_for(".lv-found.rp-bad")
    # 4. Long lines: their rest by a button, or wrapped.
    browser.type("[aria-label='Go to line']", "100\n")
    browser.click(".lv-row .lv-more", "3,000 more characters")
    browser.wait_until_gone(".lv-more")
    browser.wait_for(".lv-body.lv-wraps")
    # 5. Lines are chosen and copied; the address names them.
    browser.type("[aria-label='Go to line']", "7\n")
    browser.click("[aria-label='Choose line 7']")
    browser.wait_for(".lv-foot", "line 7 chosen")
    browser.click(".lv button", "Copy")
    browser.wait_for(".lv button", "Copied")
    assert browser.read_clipboard() == "line 7\n"
    browser.open(browser.url)
    browser.wait_for(".lv-row.lv-chosen", "line 7")
    # 6. Of several ranks one, and whole as a file.
    (logs / "rank-1.log").write_text("from the other rank\n")
    browser.click(".lv-chip", "rank-1")
    browser.wait_for(".lv-row", "from the other rank")
    browser.wait_for(".lv-foot", "1 lines")
    browser.click(".lv button", "Download")
    [log] = browser.wait("the log", lambda: list(saved.glob("*rank-1.log")))
    assert log.read_text() == "from the other rank\n"
