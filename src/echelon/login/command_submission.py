"""`echelon submit` by a login node: commands of a file, each in a copy of the source of its own.

What decides how a command is run is read here, where the source is; the login node makes the
scripts and the arrays.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.jobs.attach import attach_or_print_hint
from echelon.jobs.wait import wait_for_runs
from echelon.login.connection import LoginTarget
from echelon.login.host.submit_once import JOB_PYTHON
from echelon.login.refresh import following
from echelon.login.submission import LoginSubmission, carry_out, plan_by_login
from echelon.runs.run_folder import Run
from echelon.submission.plan import Submission, SubmitRequest
from echelon.utils.text import print_to_stderr


def submit_commands_by_login(
    planned: Submission, request: SubmitRequest, dry_run: bool, as_json: bool, wait: bool
) -> int:
    """Submit the commands of a file by the login node; returns the exit code."""
    submission = make_login_submission(planned, request)
    launch = planned.configs[0].launch
    if dry_run:
        plan_by_login(submission, os.environ).print_plan(as_json)
        return ExitCode.OK
    if planned.name_note:
        print_to_stderr(planned.name_note)
    submission, result = carry_out(submission, planned.wanted_name if request.name else None)
    if as_json:
        print(json.dumps(planned.to_dict() | {"jobs": result["runs"]}, indent=2))
        return ExitCode.OK
    for run in result["runs"]:
        print(
            f"job {run['job']}: run {run['name']} on {launch.login} in {run['folder']}", flush=True
        )
    with following(submission.runs if wait else [], is_new=True):
        if len(submission.runs) == 1:
            return attach_or_print_hint(submission.configs[0], wait)
        if wait:
            return wait_for_runs(submission.runs)
    root = Path(submission.configs[0].run.dir)
    dir_option = "" if root == Path("runs").absolute() else f" --dir {root}"
    name = submission.runs[0].name.rpartition("-")[0]
    print(f"  follow it  echelon jobs {name} --watch{dir_option}")
    print(f"  end it     echelon cancel {name}{dir_option}")
    return ExitCode.OK


def submit_one_by_login(
    planned: Submission, request: SubmitRequest, call: Mapping[str, Any] | None
) -> Run:
    """Submit one command, or the call of a function, and return its run as it is here."""
    submission = make_login_submission(planned, request, call)
    submission, _ = carry_out(submission, planned.wanted_name if request.name else None)
    [run] = submission.runs
    return run


def make_login_submission(
    planned: Submission, request: SubmitRequest, call: Mapping[str, Any] | None = None
) -> LoginSubmission:
    """Return what a login node is given to do; raises faults for what is not done there."""
    _require_offered(planned, request)
    launch = planned.configs[0].launch
    configs = planned.configs
    if call is not None:
        configs = [replace(each, program=_use_job_python(each.program)) for each in configs]
    has_agents = any(entry.launch_mode.mode == "wandb" for entry in planned.commands)
    return LoginSubmission(
        LoginTarget.from_launch(launch, planned.source.folder.name or "project"),
        configs,
        planned.source.folder,
        works_alone=True,
        uses_environment=request.env != "none",
        extra="wandb" if has_agents else "",
        call=call,
    )


def _use_job_python(program: Sequence[str]) -> list[str]:
    """Return the words that call a function with this machine's Python replaced by that of the
    jobs, which may be an older one without -P."""
    return [JOB_PYTHON if w == sys.executable else w for w in program if w != "-P"]


def _require_offered(planned: Submission, request: SubmitRequest) -> None:
    """Raise a fault for options that mean a folder of this machine."""
    login = planned.configs[0].launch.login
    faults = []
    if request.links:
        faults.append(
            Fault(
                f"--link {request.links[0]}: jobs on {login} do not see folders of this machine",
                "put the data into launch.remote_dir there: jobs see it under its name",
            )
        )
    if request.env == "source" or request.build == "job":
        option = "--env source" if request.env == "source" else "--build job"
        faults.append(
            Fault(
                f"{option}: with launch.login the environment is built on {login}, by its key",
                f"leave {option} out, or name a Python there with launch.python=PATH",
            )
        )
    if faults:
        raise EchelonError(*faults)
