"""A sweep on Slurm: an array of workers, each with its own job of the size that a trial needs."""

from __future__ import annotations

import os
import sys
import time

from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.slurm.batch_script import render_sweep_script
from echelon.launch.slurm.job_array import read_max_array_size
from echelon.launch.slurm.launcher import require_sbatch, require_slurm_accepts, submit_job
from echelon.launch.slurm.queue import query_queue
from echelon.sweep.display import open_progress
from echelon.sweep.plan import SweepPlan
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_command import format_value
from echelon.sweep.trial_store import TrialStore

_UPDATE_S = 1.0
_QUEUE_POLL_S = 5.0


def render_script(plan: SweepPlan, parallel: int) -> str:
    sweep, words = plan.sweep, plan.settings.words
    echelon = (sys.executable, "-m", "echelon")
    work = (*echelon, "sweep", "--work", str(sweep.folder))
    look = (*echelon, "preflight", *words, f"run.dir={format_value(str(sweep.folder.parent))}")
    return render_sweep_script(plan.first_config, sweep.logs, work, look, parallel)


def check_submittable(plan: SweepPlan, parallel: int) -> None:
    """Before anything is written."""
    sweep = plan.sweep
    require_sbatch()
    most = read_max_array_size(os.environ) - 1
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
    require_slurm_accepts(render_script(plan, parallel))
    jobs = find_active_jobs(sweep)
    if jobs is None:
        raise EchelonError(
            Fault(
                f"Slurm does not say whether job {_read_job_id(sweep)} of the sweep {sweep.name} is over",
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


def find_active_jobs(sweep: SweepFolder) -> list[str] | None:
    """Its workers that wait or run; None when Slurm does not say."""
    job = _read_job_id(sweep)
    answer = query_queue([job] if job else [])
    if answer.error:
        return None
    return [name for name, word in answer.states.items() if word.is_active]


def _read_job_id(sweep: SweepFolder) -> str:
    return sweep.job_file.read_text(encoding="utf-8").strip() if sweep.job_file.exists() else ""


def submit_workers(plan: SweepPlan, parallel: int) -> str:
    sweep = plan.sweep
    sweep.script_file.write_text(
        render_script(plan, parallel), encoding="utf-8", errors="surrogateescape"
    )
    job = submit_job(sweep.name, ("sbatch", "--parsable", str(sweep.script_file)), [])
    sweep.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job


def follow_workers(sweep: SweepFolder) -> None:
    """To the end of its workers."""
    store, asked, over = TrialStore(sweep), time.monotonic(), False
    with open_progress() as screen:
        while not over:
            screen.update(store)
            time.sleep(_UPDATE_S)
            if time.monotonic() - asked > _QUEUE_POLL_S:
                asked, over = time.monotonic(), find_active_jobs(sweep) == []
        screen.update(store)
