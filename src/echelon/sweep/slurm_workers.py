"""A sweep on Slurm: a job array of workers, each with the nodes that a trial needs.

A login node that has nothing but Python queues such an array too (`login.host`), so nothing is
imported here that needs another package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm.batch_script import render_sweep_script
from echelon.launch.slurm.job_array import read_max_array_size
from echelon.launch.slurm.sbatch import require_sbatch, require_slurm_accepts, submit_job
from echelon.runs.slurm_queue import query_queue, run_slurm_command
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_command import format_override_value


class WorkerArray(NamedTuple):
    """The workers of a sweep as an array of jobs."""

    sweep: SweepFolder
    config: Config
    """Of a trial: what each job asks of Slurm."""
    overrides: Sequence[str]
    """Of every trial."""
    parallel: int
    """The number of workers."""
    python: str = sys.executable

    def render_script(self) -> str:
        """Return the batch script."""
        echelon = (self.python, "-m", "echelon")
        work = (*echelon, "sweep", "--work", str(self.sweep.folder))
        run_dir = f"run.dir={format_override_value(str(self.sweep.folder.parent))}"
        preflight = (*echelon, "preflight", *self.overrides, run_dir)
        return render_sweep_script(self.config, self.sweep.logs, work, preflight, self.parallel)


def check_submittable(array: WorkerArray) -> None:
    """Raise EchelonError unless Slurm would take the array, before anything is written."""
    sweep, parallel = array.sweep, array.parallel
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
    require_slurm_accepts(array.render_script())
    jobs = find_active_jobs(sweep)
    if jobs is None:
        raise _make_silence_error(sweep)
    if jobs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} is queued or running already, as job {jobs[0]}",
                f"look with `echelon sweep show {sweep.name}`, or end it with "
                f"`echelon cancel {sweep.name}`",
            )
        )


def find_active_jobs(sweep: SweepFolder) -> list[str] | None:
    """Return the jobs of its workers that wait or run; None when Slurm does not answer."""
    job = read_job_id(sweep)
    answer = query_queue([job] if job else [])
    if answer.error:
        return None
    return [job_id for job_id, state in answer.states.items() if state.is_active]


def read_job_id(sweep: SweepFolder) -> str:
    """Return the id of the array of its workers; empty if none was submitted."""
    return sweep.job_file.read_text(encoding="utf-8").strip() if sweep.job_file.exists() else ""


def submit_workers(array: WorkerArray) -> str:
    """Submit the array, and return the id of its job."""
    sweep = array.sweep
    sweep.script_file.write_text(array.render_script(), encoding="utf-8", errors="surrogateescape")
    job = submit_job(sweep.name, ("sbatch", "--parsable", str(sweep.script_file)), [])
    sweep.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job


def cancel_workers(sweep: SweepFolder, dry_run: bool = False) -> str:
    """End the workers of a sweep, whose trials save first, and return what was done, as a
    sentence."""
    jobs, job = find_active_jobs(sweep), read_job_id(sweep)
    if jobs is None:
        raise _make_silence_error(sweep)
    if not jobs:
        raise EchelonError(
            Fault(
                f"no worker of the sweep {sweep.name} is queued or running",
                f"`echelon sweep show {sweep.name}` shows what came of it",
            )
        )
    if dry_run:
        return f"sweep {sweep.name}: its workers would be ended by `scancel {job}`"
    done = run_slurm_command("scancel", job)
    if done.returncode:
        raise EchelonError(
            Fault(
                f"job {job} of the sweep {sweep.name} was not cancelled: {done.stderr.strip()}",
                "run it again when Slurm answers",
            ),
            exit=ExitCode.FAILED,
        )
    return f"sweep {sweep.name}: its workers (job {job}) were told to save and end"


def _make_silence_error(sweep: SweepFolder) -> EchelonError:
    return EchelonError(
        Fault(
            f"Slurm does not say whether job {read_job_id(sweep)} of the sweep {sweep.name} "
            "is over",
            "run it again when Slurm answers",
        ),
        exit=ExitCode.FAILED,
    )
