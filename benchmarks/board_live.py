"""Of `board.py`: from a value that is logged to the screen, and what trainings pay for the board.

The board is open on the 10,000 runs and on the trainings beside them, and shows the curves of ten.

* logged → on the screen: one training, which takes a step now and then. The clock starts when it
  logs its loss, and ends one frame after the row of the run says the step, or after its curve was
  stroked with one more point.
* cost: 100 trainings in sessions, on all cores but one, with the board's server; the browser has
  the last core, as it would be on another machine. The server is stopped by a signal in every other
  window of time, and the steps of both kinds of windows are compared. A window begins a second
  after the signal: what has come meanwhile is read then, and counts for neither.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from board_page import BenchmarkPage, read_processor_s
from common import HERE, SCRIPTS, Figure, descendants, environment, make_figure

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from board_server import run_board

SHOWN_S, COST_PERCENT = 1.0, 0.5
STEPS = 25
PAIRS, WINDOW_S, SETTLE_S = 12, 4.0, 1.0
BEGIN_S = 300.0
NOTE_STEPS = """
  window.benchmarkSteps = { row: [], curve: [] };
  const note = (kind, step) => {
    const known = window.benchmarkSteps[kind];
    if (!step || known.some(([one]) => one === step)) return;
    const entry = [step, 0];
    known.push(entry);
    requestAnimationFrame(() => setTimeout(() => { entry[1] = Date.now() / 1000; }));
  };
  const { beginPath, lineTo, stroke } = CanvasRenderingContext2D.prototype;
  let points = 0;
  CanvasRenderingContext2D.prototype.beginPath = function () {
    points = 0;
    return beginPath.call(this);
  };
  CanvasRenderingContext2D.prototype.lineTo = function (x, y) {
    points += 1;
    return lineTo.call(this, x, y);
  };
  CanvasRenderingContext2D.prototype.stroke = function (...given) {
    if (this.lineWidth > 1.2) note("curve", points + 1);
    return stroke.apply(this, given);
  };
  setInterval(() => {
    for (const row of document.querySelectorAll(".rt-body .rt-row")) {
      if (row.querySelector("a")?.textContent !== "train-000") continue;
      const found = /([0-9]+)[/][0-9]+/.exec(row.querySelector(".rt-step")?.textContent || "");
      if (found) note("row", Number(found[1]));
    }
  }, 10);"""
HAS_CURVES = """
  return document.querySelectorAll(".cv-panel[data-metric=loss] canvas").length > 0
    && document.querySelectorAll(".cv-key").length >= %d"""


# --- from a value to the screen -----------------------------------------------------------------


def measure_delay(page: BenchmarkPage, root: Path) -> list[Figure]:
    page.leave()
    with (
        tempfile.TemporaryDirectory(prefix="echelon-bench-") as name,
        page.prepare(NOTE_STEPS),
    ):
        folder = Path(name)
        (folder / "runs").mkdir()
        with (
            run_trainings(folder, 1, "--paced") as training,
            run_board(str(root), str(folder / "runs"), cache=folder / "cache") as board,
        ):
            logged = dict([take_step(training)])
            view = "shown=1:train-000&metrics=loss"
            page.open_until(f"{board.url}&{view}", HAS_CURVES % 1)
            draw = random.Random(0)
            for _ in range(STEPS):
                time.sleep(draw.uniform(0.6, 1.4))
                step, when = take_step(training)
                logged[step] = when
            page.wait_until(f"return window.benchmarkSteps.row.some(([one]) => one === {step})")
            page.wait_until(f"return window.benchmarkSteps.curve.some(([one]) => one === {step})")
            time.sleep(0.1)  # the last frame
            seen: dict[str, list[tuple[int, float]]] = page.run("return window.benchmarkSteps")
    return [
        make_figure(
            f"a value logged → {what} on the screen",
            [when - logged[step] for step, when in seen[kind] if 2 <= step <= STEPS + 1],
            SHOWN_S,
            "s",
        )
        for kind, what in (("curve", "its point"), ("row", "its row"))
    ]


def take_step(training: subprocess.Popen[str]) -> tuple[int, float]:
    """Have the training take one step; return which one, and when it was logged."""
    assert training.stdin is not None
    assert training.stdout is not None
    training.stdin.write("\n")
    training.stdin.flush()
    step, when = training.stdout.readline().split()
    return int(step), float(when)


@contextlib.contextmanager
def run_trainings(folder: Path, count: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The program of all trainings, whose counters are in FOLDER/steps."""
    counters = folder / "steps"
    counters.write_bytes(bytes(8 * count))
    command = [sys.executable, str(SCRIPTS / "board_trainings.py"), str(folder / "runs")]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(count), str(counters), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=folder,
            text=True,
            env=environment(OMP_NUM_THREADS="1"),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# --- what it costs ------------------------------------------------------------------------------


class CostWindow(NamedTuple):
    steps: int
    server_s: float


def measure_cost(page: BenchmarkPage, root: Path, count: int, pairs: int = PAIRS) -> list[Figure]:
    page.leave()
    cores = sorted(os.sched_getaffinity(0))
    theirs = set(cores[:-1] or cores)
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        with (
            run_trainings(folder, count) as trainings,
            run_board(str(root), str(folder / "runs"), cache=folder / "cache") as board,
        ):
            wait_until_all_train(folder, count, trainings)
            pin(trainings.pid, theirs)
            pin(board.process.pid, theirs)
            with on_core(page, cores[-1]):
                page.open_until(board.url, HAS_CURVES % min(10, count))
                time.sleep(5 * SETTLE_S)
                found = [compare_windows(folder, board.process.pid, n % 2) for n in range(pairs)]
    lost = [100 * (1 - shown.steps / hidden.steps) for shown, hidden in found]
    used = [100 * shown.server_s / (WINDOW_S * len(theirs)) for shown, _ in found]
    what = f"{count} runs training, the board open"
    return [
        make_figure(f"{what}: steps lost", lost, COST_PERCENT, "%"),
        make_figure(f"{what}: the server's part of their {len(theirs)} core(s)", used, None, "%"),
    ]


def pin(root: int, cores: set[int]) -> None:
    """Keep a tree of processes on some cores, all threads of it."""
    for pid in [root, *descendants(root)]:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def on_core(page: BenchmarkPage, core: int) -> Iterator[None]:
    """Keep the browser on a core until the block ends."""
    browser = page.driver.service.process.pid
    pin(browser, {core})
    try:
        yield
    finally:
        pin(browser, os.sched_getaffinity(0))


def wait_until_all_train(folder: Path, count: int, trainings: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + BEGIN_S
    while not all(read_steps(folder)):
        if trainings.poll() is not None or time.monotonic() > deadline:
            said = (folder / "output.txt").read_text(errors="replace")[-2000:]
            begun = sum(map(bool, read_steps(folder)))
            raise RuntimeError(f"{begun} of {count} trainings have begun:\n{said}")
        time.sleep(0.2)


def read_steps(folder: Path) -> list[int]:
    data = (folder / "steps").read_bytes()
    return list(struct.unpack(f"={len(data) // 8}q", data))


def compare_windows(folder: Path, server: int, shown_first: int) -> tuple[CostWindow, CostWindow]:
    """Return what came of a window with the server, and of one without."""
    found = {}
    for is_shown in (True, False) if shown_first else (False, True):
        os.kill(server, signal.SIGCONT if is_shown else signal.SIGSTOP)
        time.sleep(SETTLE_S)
        steps, used_s, begun = sum(read_steps(folder)), read_processor_s(server), time.monotonic()
        time.sleep(WINDOW_S)
        taken_s = time.monotonic() - begun
        done = sum(read_steps(folder)) - steps
        scale = WINDOW_S / taken_s
        found[is_shown] = CostWindow(
            round(done * scale), (read_processor_s(server) - used_s) * scale
        )
    os.kill(server, signal.SIGCONT)
    return found[True], found[False]
