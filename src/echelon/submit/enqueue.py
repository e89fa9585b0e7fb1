"""Carry out a submission: copy the source, build the environment, queue the jobs, wait for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon import environments
from echelon.config.defaults_files import read_secrets
from echelon.environments.build_lock import try_lock
from echelon.environments.env_command import list_warnings
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm import job_array, sbatch
from echelon.runs.find import find_numbered_runs
from echelon.runs.run_folder import SUBMISSION_FILE, Run
from echelon.runs.status import read_run_statuses
from echelon.submit.plan import SbatchJob, Submission
from echelon.submit.source_copy import copy_source
from echelon.utils.files import write_json_atomically
from echelon.utils.locks import describe_owner
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import print_to_stderr

_POLL_S = 3.0
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


@contextlib.contextmanager
def prepare_submission(submission: Submission, env: Mapping[str, str]) -> Iterator[Submission]:
    """Do everything but queue the jobs, and yield the submission with its final environment.

    A lock on the name is held until the context ends. Queue the jobs inside it: only queued jobs
    keep another submission from taking the name and replacing the source.
    """
    # 1. Checks that write nothing. The job itself reads the secrets: that it can is found out now.
    if secrets := submission.configs[0].launch.secrets:
        read_secrets(secrets)
    if submission.launcher_kind == "slurm":
        sbatch.require_sbatch(_LOCAL_HINT)
        for job in submission.build_jobs():
            sbatch.require_slurm_accepts(job.script)
    with _hold_name(submission):
        # 2. The name, before the source of its last submission is replaced.
        _require_no_active_runs(submission)
        # 3. The source, before the environment, which is that of the copy.
        copy_source(submission.source, submission.folder)
        submission = submission.with_environment_of_copy(env)
        # 4. The record, before the build of the environment, which may take long and may fail.
        write_json_atomically(submission.folder / SUBMISSION_FILE, submission.to_dict())
        if environment := submission.environment:
            for line in list_warnings(environment):
                print_to_stderr(line)
            if submission.build_place == "login":
                environments.build_environment(environment, print_to_stderr)
        yield submission


@contextlib.contextmanager
def _hold_name(submission: Submission) -> Iterator[None]:
    """Hold a lock on the name: two submissions at once would queue jobs in one folder."""
    file = submission.folder.with_name(f".{submission.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = try_lock(file)
    except OSError as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(f"{file} cannot be written: {reason}", "give another place with run.dir=PATH")
        ) from error
    if lock is None:
        what = f"{submission.name} is being submitted by {describe_owner(file)}"
        raise EchelonError(Fault(what, "choose another --name, or wait for it"))
    try:
        yield
    finally:
        lock.release()


def _require_no_active_runs(submission: Submission) -> None:
    """Refuse a name whose runs are not over: their jobs would find other code than before."""
    single = Run(submission.folder)
    if len(submission.commands) > 1 and single.config_file.exists():
        what = f"{submission.name} is one run, and cannot be the name of several too"
        raise EchelonError(Fault(what, "choose another --name"))
    # A run named NAME-NUMBER may have been submitted alone, with its own copy of the source.
    own_folders = {submission.folder, *(run.folder for run in submission.runs)}
    named = [single, *find_numbered_runs(submission.name, submission.folder.parent)]
    known = [
        run
        for run in named
        if run.folder in own_folders or not (run.folder / SUBMISSION_FILE).exists()
        if run.config_file.exists()
    ]
    statuses, _ = read_run_statuses(known) if known else ([], "")
    if active := [s for s in statuses if s.is_active]:
        names = ", ".join(s.run for s in active[:3]) + ", …" * (len(active) > 3)
        raise EchelonError(
            Fault(
                f"{names} of that name {'is' if len(active) == 1 else 'are'} not over yet",
                "choose another --name, or end them with `echelon cancel`",
            )
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


def capture_environment_after_setup(
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


def wait_for_runs(runs: Sequence[Run]) -> int:
    """Wait until all runs are over, print their states, and return the first exit code but 0."""
    reported_states: dict[str, str] = {}
    order = {str(run.folder): number for number, run in enumerate(runs)}
    while True:
        statuses, _ = read_run_statuses(runs)
        for s in sorted(statuses, key=lambda s: order[s.folder]):
            if reported_states.get(s.folder) != s.state:
                reported_states[s.folder] = s.state
                note = f" ({s.note})" if s.note else ""
                print_to_stderr(f"{s.run}: {s.state}{note}")
        if not any(s.is_active for s in statuses):
            ended = sorted(statuses, key=lambda s: order[s.folder])
            return next((int(s.exit) for s in ended if s.exit), ExitCode.OK)
        time.sleep(_POLL_S)
