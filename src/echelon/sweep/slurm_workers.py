"""A sweep on Slurm: a job array of workers, each with the nodes that a trial needs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm.batch_script import render_sweep_script
from echelon.launch.slurm.job_array import read_max_array_size
from echelon.launch.slurm.sbatch import require_sbatch, require_slurm_accepts, submit_job
from echelon.runs.slurm_queue import query_queue
from echelon.sweep.display import open_progress
from echelon.sweep.plan import SweepPlan
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_command import format_override_value
from echelon.sweep.trial_store import TrialStore, TrialSummary

_UPDATE_S = 1.0
_QUEUE_POLL_S = 5.0


def render_worker_script(plan: SweepPlan, parallel: int) -> str:
    """Return the batch script of the workers."""
    sweep, overrides = plan.sweep, plan.settings.overrides
    echelon = (sys.executable, "-m", "echelon")
    work = (*echelon, "sweep", "--work", str(sweep.folder))
    run_dir = f"run.dir={format_override_value(str(sweep.folder.parent))}"
    preflight = (*echelon, "preflight", *overrides, run_dir)
    return render_sweep_script(plan.first_config, sweep.logs, work, preflight, parallel)


def check_submittable(plan: SweepPlan, parallel: int) -> None:
    """Raise EchelonError unless Slurm would take the array, before anything is written."""
    sweep = plan.sweep
    require_sbatch()
    max_tasks = read_max_array_size(os.environ) - 1
    if max_tasks < 1:
        raise EchelonError(
            Fault(
                "this cluster takes no job arrays (MaxArraySize), and a sweep's workers are one",
                "let wandb search, whose trials are jobs of their own (--engine wandb), or "
                "sweep within one job: launch=local",
            )
        )
    if parallel > max_tasks:
        raise EchelonError(
            Fault(
                f"--parallel {parallel}, but an array has at most {max_tasks} tasks here "
                "(MaxArraySize)",
                f"give --parallel {max_tasks} or less",
            )
        )
    require_slurm_accepts(render_worker_script(plan, parallel))
    jobs = find_active_jobs(sweep)
    if jobs is None:
        raise EchelonError(
            Fault(
                f"Slurm does not say whether job {_read_job_id(sweep)} of the sweep {sweep.name} "
                "is over",
                "run it again when Slurm answers",
            ),
            exit=ExitCode.FAILED,
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
    """Return the jobs of its workers that wait or run; None when Slurm does not answer."""
    job = _read_job_id(sweep)
    answer = query_queue([job] if job else [])
    if answer.error:
        return None
    return [job_id for job_id, state in answer.states.items() if state.is_active]


def _read_job_id(sweep: SweepFolder) -> str:
    return sweep.job_file.read_text(encoding="utf-8").strip() if sweep.job_file.exists() else ""


def submit_workers(plan: SweepPlan, parallel: int) -> str:
    """Submit the array, and return the id of its job."""
    sweep = plan.sweep
    sweep.script_file.write_text(
        render_worker_script(plan, parallel), encoding="utf-8", errors="surrogateescape"
    )
    job = submit_job(sweep.name, ("sbatch", "--parsable", str(sweep.script_file)), [])
    sweep.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job


def follow_workers(sweep: SweepFolder, earlier_trials: Sequence[TrialSummary]) -> None:
    """Show the progress beyond `earlier_trials` until no worker waits or runs."""
    store, polled_at, is_over = TrialStore(sweep), time.monotonic(), False
    with open_progress(earlier_trials) as progress:
        while not is_over:
            progress.update(store)
            time.sleep(_UPDATE_S)
            if time.monotonic() - polled_at > _QUEUE_POLL_S:
                polled_at, is_over = time.monotonic(), find_active_jobs(sweep) == []
        progress.update(store)
