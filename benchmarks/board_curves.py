"""Of `board.py`: 50 curves of 1,000,000 points each, drawn and zoomed.

A script in the page counts what is stroked on its canvases: the curves are drawn when as many lines
as there are runs were stroked in one frame.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from board_data import forget_curves
from board_page import LIMIT_S, BenchmarkPage
from common import HERE, Figure, make_figure, proportional_megabytes

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from board_server import run_board

DRAWN_S, FRAME_MS, MEMORY_MB = 0.3, 50.0, 300.0
BUILD_S = 400.0
FRAMES = 60
COUNT_LINES = """
  let now = 0;
  window.benchmarkLines = 0;
  const { stroke } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.stroke = function (...given) {
    now += 1;
    return stroke.apply(this, given);
  };
  const next = () => {
    window.benchmarkLines = Math.max(window.benchmarkLines, now);
    now = 0;
    requestAnimationFrame(next);
  };
  next();"""
DRAWN = "return window.benchmarkLines >= %d"
KNOWN = """
  return document.querySelector(".rt-count").textContent.startsWith("%d run")
    && document.querySelector(".rt-checking") === null;"""
SHOW = "window.benchmarkLines = 0; document.querySelector('button[aria-label=Charts]').click()"
HIDE = "document.querySelector(\"button[aria-label='Close the charts']\").click()"
HIDDEN = "return document.querySelector('.cv-panel') === null"
ZOOM = """
  const [frames, done] = arguments;
  const over = document.querySelector(".cv-panel[data-metric=loss] .u-over");
  const box = over.getBoundingClientRect();
  const where = { clientX: box.left + 0.6 * box.width, clientY: box.top + 0.5 * box.height };
  const times = [];
  let before = 0;
  const next = (now) => {
    if (before) times.push(now - before);
    before = now;
    if (times.length >= frames) return done(times);
    const deltaY = times.length < frames / 2 ? -40 : 40;
    const more = { deltaY, ctrlKey: true, bubbles: true, cancelable: true };
    over.dispatchEvent(new WheelEvent("wheel", { ...where, ...more }));
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);"""


class CurveRound(NamedTuple):
    first_s: float
    """By a server that was just started."""
    again_s: float
    """The charts were closed meanwhile."""
    frame_ms: list[float]
    server_mb: float
    page_mb: float


def measure_curves(page: BenchmarkPage, root: Path, lines: int, rounds: int) -> list[Figure]:
    count = sum(1 for each in root.iterdir() if not each.name.startswith("."))
    with page.prepare(COUNT_LINES):
        forget_curves(root)
        build_s = draw_for_the_first_time(page, root, count)
        found = [draw_again(page, root, count) for _ in range(rounds)]
    what = f"{count} curves × {lines:,} points"
    return [
        make_figure(f"{what}: drawn, by a new server", [r.first_s for r in found], DRAWN_S, "s"),
        make_figure(f"{what}: drawn again", [r.again_s for r in found], DRAWN_S, "s"),
        make_figure(f"{what}: a frame of a zoom", list(each_median(found)), FRAME_MS, "ms"),
        make_figure(f"{what}: … the slowest twentieth", list(each_slow(found)), None, "ms"),
        make_figure(f"{what}: memory of the server", [r.server_mb for r in found], MEMORY_MB, "MB"),
        make_figure(f"{what}: memory of the page", [r.page_mb for r in found], MEMORY_MB, "MB"),
        make_figure(f"{what}: read for the first time, and drawn", [build_s], None, "s"),
    ]


def each_median(rounds: Sequence[CurveRound]) -> Iterator[float]:
    return (statistics.median(each.frame_ms) for each in rounds)


def each_slow(rounds: Sequence[CurveRound]) -> Iterator[float]:
    return (statistics.quantiles(each.frame_ms, n=20)[-1] for each in rounds)


def draw_for_the_first_time(page: BenchmarkPage, root: Path, count: int) -> float:
    """Have all curves read, and return the seconds until all of each is drawn."""
    page.leave()
    with (
        tempfile.TemporaryDirectory(prefix="echelon-bench-") as cache,
        run_board(str(root), cache=Path(cache)) as board,
    ):
        page.open_until(f"{board.url}&panel=none&{VIEW}", KNOWN % count, BUILD_S)
        begun = time.time()
        page.act_until(SHOW, DRAWN % count, BUILD_S)
        is_read = """
            const words = document.querySelector(".cv-note").textContent;
            return window.benchmarkLines >= %d && !words.includes("reading");"""
        return page.wait_until(is_read % count, BUILD_S) - begun


VIEW = "shown=all&metrics=loss&big=loss"


def draw_again(page: BenchmarkPage, root: Path, count: int) -> CurveRound:
    page.leave()
    with (
        tempfile.TemporaryDirectory(prefix="echelon-bench-") as cache,
        run_board(str(root), cache=Path(cache)) as board,
    ):
        page.open_until(f"{board.url}&panel=none&{VIEW}", KNOWN % count, LIMIT_S)
        first_s = page.act_until(SHOW, DRAWN % count, LIMIT_S)
        page.act_until(HIDE, HIDDEN, LIMIT_S)
        again_s = page.act_until(SHOW, DRAWN % count, LIMIT_S)
        frame_ms: list[float] = page.driver.execute_async_script(ZOOM, FRAMES)
        memory = proportional_megabytes(board.process.pid)
        return CurveRound(first_s, again_s, frame_ms, memory, page.measure_memory().process)
