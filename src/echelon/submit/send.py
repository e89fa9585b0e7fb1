"""A submission as it happens: environment, copy of the code, jobs; and waiting for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon import envs
from echelon.config.defaults import secrets_of
from echelon.errors import EchelonError, Exit, Fault
from echelon.jobs.standing import stand
from echelon.launch.slurm import array, launcher
from echelon.runs import SUBMISSION, Run, write_json
from echelon.submit.plan import Job, Submission
from echelon.submit.source import keep

_LOOK_S = 3.0
_HERE = "add launch=local to run the commands on this machine, one after the other"


class Queued(NamedTuple):
    job: str
    runs: list[Run]

    def __str__(self) -> str:
        first, last = self.runs[0], self.runs[-1]
        if len(self.runs) == 1:
            return f"job {self.job}: run {first.name} in {first.folder}"
        return f"job {self.job}: {len(self.runs)} runs, {first.name} … {last.name}"

    def to_dict(self) -> dict[str, Any]:
        return {"job": self.job, "runs": [run.name for run in self.runs]}


def prepare(submission: Submission, jobs: Sequence[Job]) -> None:
    """Everything but the jobs; Slurm is asked first whether it would take them."""
    if secrets := submission.configs[0].launch.secrets:
        secrets_of(secrets)  # by the job itself; that it can is seen to now
    if submission.kind == "slurm":
        launcher.require_sbatch(_HERE)
        for job in jobs:
            launcher.require_accepted(job.script)
    _require_over(submission.runs)
    keep(submission.source, submission.folder)  # first: a build takes long enough to edit a file
    write_json(submission.folder / SUBMISSION, submission.to_dict())
    environment = submission.environment
    if environment is not None and submission.build == "login":
        envs.build(environment, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _require_over(runs: Sequence[Run]) -> None:
    """Jobs in the queue would find other code than they were submitted with."""
    known = [run for run in runs if run.config_file.exists()]
    standings, _ = stand(known) if known else ([], "")
    if at_work := [s for s in standings if s.active]:
        names = ", ".join(s.run for s in at_work[:3]) + ", …" * (len(at_work) > 3)
        raise EchelonError(
            Fault(
                f"{names} of that name {'is' if len(at_work) == 1 else 'are'} not over yet",
                "choose another --name, or end them with `echelon cancel`",
            )
        )


def queue(jobs: Sequence[Job]) -> list[Queued]:
    found = []
    for job in jobs:
        if job.array is not None:
            number, runs = array.queue(job.array)
        else:
            number, run = launcher.queue(job.configs[0], job.script)
            runs = [run]
        found.append(Queued(number, runs))
    return found


def entered(lines: Sequence[str], folder: Path, env: dict[str, str]) -> dict[str, str]:
    """The variables of a shell that went through these lines, as the job's does."""
    text = "\n".join(['fail() { exit "$1"; }', *lines, "exec env -0"])
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=env, stdout=subprocess.PIPE)
    if done.returncode:
        raise EchelonError(
            Fault("the environment cannot be entered", "see above, and `echelon env show`"),
            exit=Exit.FAILED,
        )
    pairs = (os.fsdecode(item).partition("=") for item in done.stdout.split(b"\0") if item)
    return {name: value for name, _, value in pairs if not name.startswith("BASH_FUNC_")}


def wait_for(runs: Sequence[Run]) -> int:
    """Until all are over; the code is the first that is not 0."""
    told: dict[str, str] = {}
    order = {str(run.folder): number for number, run in enumerate(runs)}
    while True:
        standings, _ = stand(runs)
        for s in sorted(standings, key=lambda s: order[s.folder]):
            if told.get(s.folder) != s.state:
                told[s.folder] = s.state
                note = f" ({s.note})" if s.note else ""
                _say(f"{s.run}: {s.state}{note}")
        if not any(s.active for s in standings):
            ended = sorted(standings, key=lambda s: order[s.folder])
            return next((int(s.exit) for s in ended if s.exit), Exit.OK)
        time.sleep(_LOOK_S)
