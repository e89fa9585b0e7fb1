"""Carry out a submission: take a name, copy the source, build the environment, queue the jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon import environments
from echelon.config.defaults_files import read_secrets
from echelon.environments.env_command import list_warnings
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.containers.check import require_container_for_jobs
from echelon.launch.slurm import job_array, sbatch
from echelon.runs.create import clear_last_end
from echelon.runs.run_folder import SUBMISSION_FILE, Run
from echelon.runs.submitted_run import SUBMITTED_RUN_VARIABLE
from echelon.runs.trusted_code import require_trusted_file
from echelon.runs.writer import claim_run_folder, release_run_folder
from echelon.submission.plan import SbatchJob, Submission
from echelon.submission.source_copy import copy_source
from echelon.utils.files import write_json_atomically
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import print_to_stderr

_LOCAL_HINT = "add launch=local to run the commands on this machine, one after the other"


class QueuedJob(NamedTuple):
    """A job in Slurm's queue, and its runs."""

    job_id: str
    runs: list[Run]

    def __str__(self) -> str:
        first, last = self.runs[0], self.runs[-1]
        if len(self.runs) == 1:
            return f"job {self.job_id}: run {first.name} in {first.folder}"
        return f"job {self.job_id}: {len(self.runs)} runs, {first.name} … {last.name}"

    def to_dict(self) -> dict[str, Any]:
        return {"job": self.job_id, "runs": [run.name for run in self.runs]}


def prepare_submission(submission: Submission, env: Mapping[str, str]) -> Submission:
    """Do everything but queue the jobs, and return the submission with its final name and
    environment.

    If it fails, nothing of it is left, so that the name can be used again.
    """
    # 1. Checks that write nothing. The job itself reads the secrets: that it can is found out now.
    if secrets := submission.configs[0].launch.secrets:
        read_secrets(secrets)
    if submission.launcher_kind == "slurm":
        sbatch.require_sbatch(_LOCAL_HINT)
        require_container_for_jobs(submission.configs[0])
        for job in submission.build_jobs():
            sbatch.require_slurm_accepts(job.script)
    # 2. The name: what has it from here on is never replaced by another submission.
    submission = _reserve_name(submission)
    try:
        # 3. The source, before the environment, which is that of the copy.
        copy_source(submission.source, submission.folder)
        submission = submission.with_environment_of_copy(env)
        # 4. The record, before the build of the environment, which may take long.
        write_json_atomically(submission.folder / SUBMISSION_FILE, submission.to_dict())
        if environment := submission.environment:
            for line in list_warnings(environment):
                print_to_stderr(line)
            if submission.build_place == "login":
                environments.build_environment(environment, print_to_stderr)
    except BaseException:
        # No command has run yet, so all that is there is ours.
        for folder in _list_own_folders(submission):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return submission


def _list_own_folders(submission: Submission) -> list[Path]:
    """Return the folders of the submission and of its runs, each once."""
    return list(dict.fromkeys([submission.folder, *(run.folder for run in submission.runs)]))


def _reserve_name(submission: Submission) -> Submission:
    """Make the folders of a submission, and return it with the name that it got.

    A folder is made by one process only, so two submissions at once get different names.
    """
    root = submission.folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not _make_own_folders(submission):
            submission = submission.with_free_name()
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{submission.folder} cannot be written: {format_os_error_reason(error)}",
                "give another place with run.dir=PATH",
            )
        ) from error
    return submission


def _make_own_folders(submission: Submission) -> bool:
    """Make all folders of the submission; returns False, with none made, if one of them exists."""
    made: list[Path] = []
    try:
        for folder in _list_own_folders(submission):
            folder.mkdir()
            made.append(folder)
    except FileExistsError:
        for folder in made:
            folder.rmdir()
        return False
    return True


def prepare_work_folder(submission: Submission, run: Run, env: Mapping[str, str]) -> dict[str, str]:
    """Make the working folder of a run on this machine, as a batch script does, and return the
    variables of its command there."""
    partial = run.folder / ".work"
    try:
        shutil.copytree(submission.source_copy, partial, symlinks=True)
        partial.rename(run.work_folder)
    except (OSError, shutil.Error) as error:
        raise EchelonError(
            Fault(
                f"the working folder {run.work_folder} cannot be made: {error}",
                "free some space, or give another place with run.dir=PATH",
            )
        ) from error
    return _capture_environment_after_setup(
        submission.render_environment_setup(),
        run.work_folder,
        {**env, SUBMITTED_RUN_VARIABLE: str(run.folder)},
    )


def enqueue_jobs(jobs: Sequence[SbatchJob]) -> Iterator[QueuedJob]:
    """Queue jobs one after the other. When one is refused, the fault names those before it."""
    queued: list[QueuedJob] = []
    for job in jobs:
        try:
            queued.append(_enqueue_job(job))
        except EchelonError as error:
            undo_hints = [
                Fault(f"{each} was queued before that", f"`scancel {each.job_id}` takes it back")
                for each in queued
            ]
            raise EchelonError(*error.faults, *undo_hints, exit=error.exit) from error
        yield queued[-1]


def _enqueue_job(job: SbatchJob) -> QueuedJob:
    if job.array is not None:
        return QueuedJob(*job_array.queue_array(job.array))
    job_id, run = sbatch.queue_run(job.configs[0], job.script)
    return QueuedJob(job_id, [run])


def enqueue_again(run: Run) -> QueuedJob:
    """Queue the job of a submitted command again, as it was, in the folder that it left."""
    sbatch.require_sbatch()
    config = run.read_launch_config()
    script, task = job_array.find_array_task(run) or (run.script_file, None)
    require_trusted_file(script, script.stat())
    options = [f"--job-name={run.name}", *([] if task is None else [f"--array={task}"])]
    if config.launch.after:
        options.append("--dependency=")  # it has been waited for, and Slurm may have forgotten it
    claim_run_folder(run)
    try:
        clear_last_end(run)
        sbatch.record_queued(run, config)
        command = ("sbatch", "--parsable", *options, str(script))
        job_id = sbatch.submit_job(run.name, command, [run])
        job_id += "" if task is None else f"_{task}"
        run.job_id_file.write_text(f"{job_id}\n", encoding="utf-8")
    finally:
        # From here on the queue says that the folder is taken.
        release_run_folder(run)
    return QueuedJob(job_id, [run])


def _capture_environment_after_setup(
    lines: Sequence[str], folder: Path, env: dict[str, str]
) -> dict[str, str]:
    """Return the variables of a shell that has run these lines, as the job's shell does."""
    text = "\n".join(['fail() { exit "$1"; }', *lines, "exec env -0"])
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=env, stdout=subprocess.PIPE)
    if done.returncode:
        raise EchelonError(
            Fault("the environment cannot be entered", "see above, and `echelon env show`"),
            exit=ExitCode.FAILED,
        )
    pairs = (os.fsdecode(item).partition("=") for item in done.stdout.split(b"\0") if item)
    return {name: value for name, _, value in pairs if not name.startswith("BASH_FUNC_")}
