"""Sweeps, machines and jobs in a real browser."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from board_pages import OpenBoard, count_pixels
from board_server import run_board
from board_sweeps import make_sweep, run_trials
from browser import Browser, Key
from fake_nvml import GIB, FakeDriver, gpu, process, run_idle_process
from run_folders import lines, make_run

from echelon.runs.preflight_results import record_preflight_results

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

QUEUE = """\
#!/bin/sh
echo '7|gpu|somebody|RUNNING|1:00|2:00|2|gres:gpu:4|2026-01-01T00:00:00|None|their training'
echo '8|gpu|somebody|PENDING|0:00|2:00|1|gres:gpu:8|2026-01-01T00:00:00|Resources|waits <b>here'
"""


def test_a_sweep(browser: Browser, open_board: OpenBoard, root: Path) -> None:
    store = make_sweep(root)
    run_trials(store, 9)
    leased = store.take_trial()
    assert not isinstance(leased, bool)
    store.report_history(leased, [5.0])
    for number in range(10):
        status = {"state": "running" if number == 9 else "finished", "step": 40}
        make_run(root, f"s-{number}", lines(), status=status, lr=0.1 * (number + 1))
    open_board(root, view="page=sweeps")
    # 1. All sweeps.
    browser.wait_for("td .sw-counts", "9 finished")
    browser.click(".sw-link", "s")
    # 2. The best so far, importance, what runs where, and the parameters of all trials.
    browser.wait_for(".sw .rp-dim", "10 of 12 trials")
    browser.wait("the chart", lambda: count_pixels(browser, ".sw-chart canvas") > 100)
    label = browser.run("return document.querySelector('.sw-chart canvas').ariaLabel")
    assert "The value of 10 trials" in label
    browser.wait_for(".sw-importance dt", "lr")
    shares = [int(text.split()[0]) for text in browser.list_texts(".sw-importance .rp-num")]
    assert sum(shares) in (99, 100, 101)
    browser.wait_for("section", "What runs where")
    assert (
        "running"
        in browser.wait_for(".rp-card tr button.sw-link")
        .find_element("xpath", "./ancestor::tr")
        .text
    )
    browser.wait("lines", lambda: count_pixels(browser, ".sw-parallel .pc-body canvas") > 300)
    # 3. The table of trials, the best one first.
    browser.click(".sw-head-row button", "loss")
    browser.wait("the best first", lambda: "sw-is-best" in read_classes(browser, ".sw-row"))
    values = [float(row.split("\n")[3]) for row in read_lines(browser, ".sw-row")[:9]]
    assert values == sorted(values)
    browser.type("[aria-label='Search trials']", "samples=64")
    browser.wait(
        "those alone",
        lambda: {row.split("\n")[5] for row in read_lines(browser, ".sw-row")} == {"64"},
    )
    browser.type("[aria-label='Search trials']", Key.BACKSPACE)
    # 4. It goes on.
    store.end_trial(leased, "finished")
    make_run(root, "s-10", lines(), status={"step": 40}, lr=0.7)
    browser.wait_for(".sw-counts", "10 finished")
    browser.wait_until_gone(".rp-card h3", "What runs where")
    # 5. To one of its runs.
    browser.click(".sw-row .sw-link", "★")
    browser.wait_for(".rp-name", "s-")


def test_machines_and_jobs(browser: Browser, root: Path, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is built with gcc")
    driver = FakeDriver(tmp_path / "driver", gpu(0, use=42, used=3 * GIB), gpu(1))
    tool = tmp_path / "bin" / "squeue"
    tool.parent.mkdir()
    tool.write_text(QUEUE)
    tool.chmod(0o755)
    make_run(root, "mine", lines(), status={"step": 40})
    cache = tmp_path / "cache"
    bad = {"host": "n2", "check": "GPU memory", "state": "fail", "found": "2 GiB", "do": "look"}
    good = {"host": "n1", "check": "GPU memory", "state": "ok", "found": "80 GiB"}
    results = {"ready": False, "nodes": ["n1", "n2"], "checks": [good, bad], "launcher": "slurm"}
    record_preflight_results(results, "mine", {**os.environ, "ECHELON_CACHE": str(cache)})
    path = f"{tool.parent}:{os.environ['PATH']}"
    libraries = str(driver.library.parent)
    with (
        run_idle_process("train") as pid,
        run_board(str(root), cache=cache, PATH=path, LD_LIBRARY_PATH=libraries) as board,
    ):
        driver.set(gpu(0, use=42, used=3 * GIB), gpu(1), process(pid, on=0, gib=2.5))
        browser.open(f"{board.url}&page=machines")
        # 1. The GPUs of here with their users, and the processors.
        browser.wait_for(".mc-host-name", socket.gethostname())
        browser.wait_for(".mc-gpu", "42 %")
        assert f"pid {pid}" in browser.wait_for(".mc-gpu", "NVIDIA H200").text
        assert browser.find(".mc-gpu", "free")
        assert browser.find(".mc-gpu", f"{os.cpu_count()} cores")
        # 2. Own jobs, and the queue.
        browser.wait_for("section[aria-label=Jobs] tr", "mine")
        browser.wait_for("section[aria-label=Jobs] tr", "their training")
        assert "Resources" in browser.wait_for("tr", "waits <b>here").text
        # 3. What preflight found, the worst first.
        browser.wait_for(".mc-preflight summary", "not ready: 1 to fix")
        [first, *_] = browser.list_texts(".mc-preflight tbody tr")
        assert "n2" in first
        # 4. It goes on by itself, and keeps what was.
        driver.set(gpu(0, use=77, used=3 * GIB), gpu(1))
        browser.wait_for(".mc-gpu", "77 %")
        browser.wait_until_true("document.querySelector('.mc-util').points.numberOfItems > 3")
        browser.click("section[aria-label=Jobs] .sw-link", "mine")
        browser.wait_for(".rp-name", "mine")
        browser.leave_pages()


def read_lines(browser: Browser, css: str) -> list[str]:
    """The texts of rows, from the top; a line for each cell."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
    texts: list[str] = browser.run(script, css)
    return texts


def read_classes(browser: Browser, css: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0])?.className ?? ''", css))
