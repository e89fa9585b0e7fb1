"""`echelon scale`: another number of nodes for a run that is training."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.jobs.agent_request import ask_agent
from echelon.launch.node.node_scaling import ScaleAnswer
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import get_last_error_line, list_job_nodes, run_slurm_command
from echelon.runs.status import RunStatus, read_run_status
from echelon.utils.files import read_json_object
from echelon.utils.text import format_count

_LEAVE_LIMIT_S = 600.0
"""Nodes finish their step before they leave."""
_POLL_S = 0.2


def parse_node_count(words: Sequence[str]) -> int:
    """Return N of `nodes=N`. Raises EchelonError for anything else."""
    if len(words) == 1 and words[0].startswith("nodes=") and words[0][6:].isdecimal():
        if count := int(words[0][6:]):
            return count
        fault = Fault("nodes=0 would leave nobody", "`echelon cancel RUN` saves and ends it")
    else:
        given = " ".join(words) or "nothing"
        fault = Fault(f"`echelon scale` takes nodes=N, and was given {given}", "such as nodes=2")
    raise EchelonError(fault)


def scale_run(run: Run, count: int, as_json: bool) -> int:
    """Have a run train on so many nodes. Raises EchelonError where that cannot be."""
    status = read_run_status(run)
    _require_scalable(run, status)
    answer = ScaleAnswer.from_json(ask_agent(run, {"scale": count}))
    if answer.faults:
        raise EchelonError(*answer.faults)
    if answer.leaving:
        _wait_until_left(run, answer)
    returned = _give_back_to_slurm(status, answer.vacated_hosts)
    job = None
    if answer.missing and status.job:
        from echelon.launch.slurm.joining_job import queue_joining_job

        job = queue_joining_job(run.read_launch_config(), run, answer.missing, answer.first_node)
    if as_json:
        print(json.dumps(_describe(run, count, answer, returned, job)))
    else:
        _print_answer(run, count, answer, returned, job)
    return ExitCode.OK


def _require_scalable(run: Run, status: RunStatus) -> None:
    """Raise an EchelonError for a run whose number of nodes cannot be changed from here."""
    if status.state != "running":
        note = f" ({status.note})" if status.note else ""
        what = f"run {run.name} cannot be scaled: it is {status.state}{note}"
        hint = (
            "scale it when it trains"
            if status.is_active
            else f"echelon resume {run.name} launch.nodes=N goes on with another number"
        )
        raise EchelonError(Fault(what, hint), exit=ExitCode.NOT_FOUND)
    if status.launcher not in ("ssh", "slurm", "env"):
        raise EchelonError(
            Fault(
                f"run {run.name} cannot be scaled: launch={status.launcher} has one node, or its "
                "processes were started by somebody else",
                "start runs that are to grow with launch=ssh or launch=slurm",
            )
        )
    if not run.stack_agent_file.exists():
        raise EchelonError(
            Fault(
                f"run {run.name} cannot be scaled: its hosts do not share {run.folder} with this "
                "machine, or it has only begun",
                "give all hosts one folder: run.dir=PATH",
            )
        )


def _wait_until_left(run: Run, answer: ScaleAnswer) -> None:
    """Wait until the others go on without the nodes that leave, and the ranks there have ended."""
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    while time.monotonic() < deadline:
        known = read_json_object(run.membership_file) or {}
        if known and not set(answer.leaving_nodes) & {*known["nodes"], *known["ending_nodes"]}:
            return
        if not read_run_status(run).is_active:
            return
        time.sleep(_POLL_S)
    raise EchelonError(
        Fault(
            f"{', '.join(answer.leaving)} did not leave within {_LEAVE_LIMIT_S:g} s",
            f"a step may take longer; `echelon logs {run.name}` shows when they have left",
        ),
        exit=ExitCode.FAILED,
    )


def _give_back_to_slurm(status: RunStatus, hosts: Sequence[str]) -> list[str]:
    """Take hosts without a node out of the job; returns those that were. The batch script runs on
    the first host of the job, which therefore stays."""
    if not status.job or not hosts:
        return []
    listed = list_job_nodes(status.job)
    kept = [host for host in listed if host not in hosts or host == listed[0]]
    if not kept or kept == listed:
        return []
    done = run_slurm_command(
        "scontrol", "update", f"JobId={status.job}", f"NodeList={','.join(kept)}"
    )
    if done.returncode:
        raise EchelonError(
            Fault(
                f"{', '.join(hosts)} left the run, but Slurm does not take them out of job "
                f"{status.job}: {get_last_error_line(done)}",
                "they stay allocated until the job ends",
            ),
            exit=ExitCode.FAILED,
        )
    return [host for host in listed if host not in kept]


def _describe(
    run: Run, count: int, answer: ScaleAnswer, returned: Sequence[str], job: str | None
) -> Mapping[str, Any]:
    return {
        "version": 1,
        "run": run.name,
        "nodes": count,
        "before": answer.before,
        "left": list(answer.leaving),
        "joining": list(answer.joining),
        "starting": answer.missing,
        "job": job,
        "given_back_to_slurm": bool(returned),
    }


def _print_answer(
    run: Run, count: int, answer: ScaleAnswer, returned: Sequence[str], job: str | None
) -> None:
    print(f"run {run.name}: {format_count(answer.before, 'node')} → {count}")
    if answer.leaving:
        print(f"  left: {', '.join(answer.leaving)}")
    if returned:
        print(f"  given back to Slurm: {', '.join(returned)}")
    if answer.joining:
        print(f"  {', '.join(answer.joining)} takes part as soon as it is ready")
    if answer.missing:
        where = f"in job {job}, which ends with the run" if job else "on hosts of launch.hosts"
        print(f"  {format_count(answer.missing, 'node')} more {where}")
    if answer.before == count:
        print("  nothing to do")
