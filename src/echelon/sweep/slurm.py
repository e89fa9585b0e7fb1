"""A sweep on Slurm: an array of workers, each with its own job of the size that a trial needs."""

from __future__ import annotations

import os
import sys
import time

from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.slurm.array import max_size
from echelon.launch.slurm.launcher import require_accepted, submit
from echelon.launch.slurm.queue import queued
from echelon.launch.slurm.script import render_workers
from echelon.sweep.book import Book
from echelon.sweep.folder import Sweep
from echelon.sweep.show import watching

_LOOK_S = 1.0
_ASK_S = 5.0


def script(sweep: Sweep, config: Config, parallel: int) -> str:
    command = (sys.executable, "-m", "echelon", "sweep", "--work", str(sweep.folder))
    return render_workers(config, sweep.name, sweep.logs, command, parallel)


def check(sweep: Sweep, config: Config, parallel: int) -> None:
    """Before anything is written."""
    most = max_size(os.environ) - 1
    if parallel > most:
        raise EchelonError(
            Fault(f"--parallel {parallel}, but an array has at most {most} tasks here", "ask less")
        )
    require_accepted(script(sweep, config, parallel))
    if jobs := at_work(sweep):
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} is queued or running already, as job {jobs[0]}",
                f"look with `echelon sweep show {sweep.name}`, or end it with "
                f"`scancel {jobs[0].partition('_')[0]}`",
            )
        )


def at_work(sweep: Sweep) -> list[str]:
    """Its workers that wait or run."""
    if not sweep.job_file.exists():
        return []
    job = sweep.job_file.read_text().strip()
    return [name for name, word in queued([job]).words.items() if word.active]


def submit_workers(sweep: Sweep, config: Config, parallel: int) -> str:
    sweep.script_file.write_text(script(sweep, config, parallel))
    job = submit(sweep.name, ("sbatch", "--parsable", str(sweep.script_file)), [])
    sweep.job_file.write_text(f"{job}\n")
    return job


def follow(sweep: Sweep) -> int:
    """To the end of its workers."""
    book, asked, jobs = Book(sweep), time.monotonic(), [""]
    with watching() as screen:
        while jobs:
            screen.tell(book)
            time.sleep(_LOOK_S)
            if time.monotonic() - asked > _ASK_S:
                asked, jobs = time.monotonic(), at_work(sweep)
        screen.tell(book)
    return Exit.OK
