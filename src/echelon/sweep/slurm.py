"""A sweep on Slurm: an array of workers, each with its own job of the size that a trial needs."""

from __future__ import annotations

import os
import sys
import time

from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.slurm.array import max_size
from echelon.launch.slurm.launcher import require_accepted, require_sbatch, submit
from echelon.launch.slurm.queue import queued
from echelon.launch.slurm.script import render_workers
from echelon.sweep.begin import Prepared
from echelon.sweep.book import Book
from echelon.sweep.folder import Sweep
from echelon.sweep.given import written
from echelon.sweep.show import watching

_LOOK_S = 1.0
_ASK_S = 5.0


def script(prepared: Prepared, parallel: int) -> str:
    sweep, words = prepared.sweep, prepared.settings.words
    echelon = (sys.executable, "-m", "echelon")
    work = (*echelon, "sweep", "--work", str(sweep.folder))
    look = (*echelon, "preflight", *words, f"run.dir={written(str(sweep.folder.parent))}")
    return render_workers(prepared.first, sweep.logs, work, look, parallel)


def check(prepared: Prepared, parallel: int) -> None:
    """Before anything is written."""
    sweep = prepared.sweep
    require_sbatch()
    most = max_size(os.environ) - 1
    if most < 1:
        raise EchelonError(
            Fault(
                "this cluster takes no job arrays (MaxArraySize), and a sweep's workers are one",
                "let wandb search, whose trials are jobs of their own (--engine wandb), or "
                "sweep within one job: launch=local",
            )
        )
    if parallel > most:
        raise EchelonError(
            Fault(
                f"--parallel {parallel}, but an array has at most {most} tasks here (MaxArraySize)",
                f"give --parallel {most} or less",
            )
        )
    require_accepted(script(prepared, parallel))
    jobs = at_work(sweep)
    if jobs is None:
        raise EchelonError(
            Fault(
                f"Slurm does not say whether job {_job(sweep)} of the sweep {sweep.name} is over",
                "type it again when Slurm answers",
            ),
            exit=Exit.FAILED,
        )
    if jobs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} is queued or running already, as job {jobs[0]}",
                f"look with `echelon sweep show {sweep.name}`, or end it with "
                f"`scancel {jobs[0].partition('_')[0]}`",
            )
        )


def at_work(sweep: Sweep) -> list[str] | None:
    """Its workers that wait or run; None when Slurm does not say."""
    job = _job(sweep)
    answer = queued([job] if job else [])
    if answer.silence:
        return None
    return [name for name, word in answer.words.items() if word.active]


def _job(sweep: Sweep) -> str:
    return sweep.job_file.read_text(encoding="utf-8").strip() if sweep.job_file.exists() else ""


def submit_workers(prepared: Prepared, parallel: int) -> str:
    sweep = prepared.sweep
    sweep.script_file.write_text(
        script(prepared, parallel), encoding="utf-8", errors="surrogateescape"
    )
    job = submit(sweep.name, ("sbatch", "--parsable", str(sweep.script_file)), [])
    sweep.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job


def follow(sweep: Sweep) -> None:
    """To the end of its workers."""
    book, asked, over = Book(sweep), time.monotonic(), False
    with watching() as screen:
        while not over:
            screen.tell(book)
            time.sleep(_LOOK_S)
            if time.monotonic() - asked > _ASK_S:
                asked, over = time.monotonic(), at_work(sweep) == []
        screen.tell(book)
