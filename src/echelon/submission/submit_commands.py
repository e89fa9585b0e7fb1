"""`echelon submit`: the commands of a file as runs, queued on Slurm or run here one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from echelon.config.defaults_files import FileDefaults
from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.jobs.attach import attach_or_print_hint
from echelon.jobs.wait import wait_for_runs
from echelon.launch.launcher import collect_exit_codes
from echelon.runs.run_folder import Run
from echelon.submission.dry_run import print_submission
from echelon.submission.enqueue import enqueue_jobs, prepare_submission, prepare_work_folder
from echelon.submission.plan import Submission, SubmitRequest, plan_submission
from echelon.submission.prerequisites import require_prerequisites
from echelon.utils.text import print_to_stderr


def submit_commands(
    request: SubmitRequest,
    defaults: FileDefaults,
    dry_run: bool,
    as_json: bool,
    wait: bool,
    start_run: Callable[[Config], int],
    submit_elsewhere: Callable[[Submission, SubmitRequest], int],
) -> int:
    """Submit the commands of a file, from the code as it is now, each as a run of its own.

    Returns 0 once they are queued; if they were waited for or run here, the first code that is not
    0. `start_run` starts one run on this machine and returns its exit code; `submit_elsewhere`
    gives a submission to the login node that `launch.login` names.
    """
    submission = plan_submission(request, defaults, os.environ)
    if submission.configs[0].launch.login is not None:
        return submit_elsewhere(submission, request)
    require_prerequisites(submission, os.environ)
    if dry_run:
        print_submission(submission, submission.build_jobs(), as_json)
        return ExitCode.OK
    submission = prepare_submission(submission, os.environ)
    if submission.name_note:
        print_to_stderr(submission.name_note)
    if submission.launcher_kind != "slurm":
        return _run_here(submission, start_run)  # what is printed is the programs' own
    queued = []
    for queued_job in enqueue_jobs(submission.build_jobs()):
        queued.append(queued_job.to_dict())
        if not as_json:
            print(queued_job, flush=True)
    if as_json:
        print(json.dumps(submission.to_dict() | {"jobs": queued}, indent=2))
    if len(submission.commands) == 1 and not as_json:
        return attach_or_print_hint(submission.configs[0], wait)
    if not as_json:
        root = submission.folder.parent
        dir_option = "" if root == Path("runs").absolute() else f" --dir {root}"
        print(f"  follow it  echelon jobs {submission.name} --watch{dir_option}")
        print(f"  end it     echelon cancel {submission.name}{dir_option}")
    return wait_for_runs(submission.runs) if wait else ExitCode.OK


def _run_here(submission: Submission, start_run: Callable[[Config], int]) -> int:
    """Run the commands one after the other; returns the first code that is not 0.

    As in a job array, one that fails does not keep the others from running.
    """
    before = dict(os.environ)

    def start_afresh(config: Config) -> int:
        # A run may leave variables behind, such as OMP_NUM_THREADS, that the next must not see.
        run = Run.from_config(config)
        variables = prepare_work_folder(submission, run, before)
        os.chdir(run.work_folder)
        os.environ.clear()
        os.environ.update(variables)
        return start_run(config)

    codes = collect_exit_codes(map(start_afresh, submission.configs))
    return next((code for code in codes if code), ExitCode.OK)
