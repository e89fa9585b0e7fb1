"""The data of `board.py`: run folders, made once and kept in build/board-benchmark.

* many runs: each of 20 steps with its loss, 2 evaluations, a log and a summary, as a real training
  of the toy left its own, over a grid of settings and seeds (tests/helpers/board_runs.py).
* long runs: a line of metrics.jsonl with a loss for each of a million steps, and its summary.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from common import HERE
from echelon.runs.metrics_file import compute_mark
from echelon.runs.metrics_summary import MetricsSummary, MetricSummary, write_summary

sys.path.append(str(HERE.parent / "tests" / "helpers"))
from board_runs import RunTemplate, read_template, train_template, write_long_run, write_runs

KEPT = HERE.parent / "build" / "board-benchmark"
BOARD_FOLDER = ".board"
CURVES_FOLDER = ".curves"


def find_many_runs(count: int) -> Path:
    """Return a folder of so many runs."""
    return make_once(
        KEPT / f"runs-{count}", lambda folder: write_runs(folder, get_template(), count)
    )


def find_long_runs(count: int, lines: int) -> Path:
    """Return a folder of so many runs, each of so many lines."""
    return make_once(
        KEPT / f"long-{count}-{lines}", lambda folder: write_long_runs(folder, count, lines)
    )


def get_template() -> RunTemplate:
    folder = make_once(KEPT / "template", train_template)
    return read_template(folder / "runs" / "tiny")


def write_long_runs(folder: Path, count: int, lines: int) -> None:
    template = get_template()
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        each = [
            pool.submit(write_one_long_run, folder, f"long-{seed:03d}", template, lines, seed)
            for seed in range(count)
        ]
        for one in each:
            one.result()


def write_one_long_run(root: Path, name: str, template: RunTemplate, lines: int, seed: int) -> None:
    """Write a run and its summary, as its training would have; no other program would read a
    million lines to know the last one."""
    run = write_long_run(root, name, template, lines, seed)
    text = run.metrics_file.read_bytes()
    values = [float(value) for value in re.findall(rb'"loss": ([^,]+)', text)]
    best, worst = min(values), max(values)
    low, high = 1 + values.index(best), 1 + values.index(worst)
    loss = MetricSummary(lines, values[-1], lines, best, low, worst, high)
    summary = MetricsSummary({"loss": loss}, last_step=lines, offset=len(text))
    with run.metrics_file.open("rb") as file:
        summary.mark = compute_mark(file, summary.offset)
    write_summary(run, summary, by_training=True)


def make_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return a folder that is written if it is not there yet. One that was not finished is none."""
    if not folder.is_dir():
        with replace_folder(folder) as new:
            write(new)
    return folder


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    new = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    os.sync()  # what is not on the disk cannot be dropped from memory
    new.rename(folder)


def forget_index(root: Path) -> None:
    """Remove what a board knows of a root."""
    shutil.rmtree(root / BOARD_FOLDER, ignore_errors=True)


def forget_curves(root: Path) -> None:
    for folder in root.glob(f"*/{CURVES_FOLDER}"):
        shutil.rmtree(folder)


def drop_from_memory(folder: Path) -> None:
    """Have the contents of all files read from the disk again. Names and sizes stay known, as only
    the whole machine could forget these."""
    for parent, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
