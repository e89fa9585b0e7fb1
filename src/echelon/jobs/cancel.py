"""`echelon cancel`: ask runs to save and end, and not to be queued again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import EchelonError, Exit, Fault
from echelon.jobs.standing import Standing, stand
from echelon.launch.process import is_alive, send
from echelon.launch.slurm.queue import said, slurm
from echelon.launch.slurm.requeue import REQUEUE
from echelon.runs import Run


def cancel(runs: Sequence[Run], now: bool) -> int:
    by_folder = {str(run.folder): run for run in runs}
    standings, silence = stand(by_folder.values())
    faults = [fault for s in standings if (fault := _out_of_reach(s, silence))]
    if faults:
        raise EchelonError(*faults)
    active = [s for s in standings if s.active]
    for standing in active:
        _mark(by_folder[standing.folder])
    alone = [s for s in active if s.job and not _is_trial(by_folder[s.folder])]
    _cancel_jobs(alone, now)
    for standing in standings:
        if not standing.active:
            note = f" ({standing.note})" if standing.note else ""
            print(f"run {standing.run} is {standing.state}{note}: there is nothing to cancel")
        elif not standing.job:
            _cancel_process(standing, by_folder[standing.folder], now)
        elif standing not in alone:
            print(f"run {standing.run}: the worker of its sweep was told to end it")
    return Exit.OK


def _is_trial(run: Run) -> bool:
    """Of a sweep's worker, whose job is that of the trials after it as well."""
    return bool(run.status().get("in_sweep"))


def _out_of_reach(s: Standing, silence: str) -> Fault | None:
    if s.active and s.job and silence:
        return Fault(
            f"run {s.run} is job {s.job}, but Slurm does not answer: {silence}",
            "type it on a login node, or again when Slurm is back",
        )
    if s.active and s.launcher == "slurm" and not s.job:
        return Fault(f"run {s.run} has no job number yet", "wait for the command that submits it")
    process = Run(Path(s.folder)).status().get("process")
    if s.active and not s.job and is_alive(process) is None:
        return Fault(
            f"run {s.run} was started on {s.host}, and can be ended only there",
            f"ssh {s.host} echelon cancel {s.folder}",
        )
    return None


def _mark(run: Run) -> None:
    """Before anything else, so that nobody queues it again meanwhile."""
    run.cancel_file.touch()
    (run.folder / REQUEUE).unlink(missing_ok=True)


def _cancel_jobs(standings: Sequence[Standing], now: bool) -> None:
    """On TERM ranks save; KILL comes after Slurm's KillWait, or to the step at once."""
    jobs = [str(s.job) for s in standings]
    if jobs and now:
        slurm("scancel", "--quiet", "--signal=KILL", *(f"{job}.0" for job in jobs))
    if jobs and (done := slurm("scancel", *jobs)).returncode:
        for standing in standings:
            Run(Path(standing.folder)).cancel_file.unlink(missing_ok=True)
        raise EchelonError(
            Fault(f"Slurm does not cancel job {', '.join(jobs)}: {said(done)}", _WHOSE),
            exit=Exit.FAILED,
        )
    for s in standings:
        waited = s.state in ("queued", "requeued")
        print(f"run {s.run}: job {s.job} " + ("left the queue" if waited else _DID[now]))


def _cancel_process(standing: Standing, run: Run, now: bool) -> None:
    """Under an agent, workers end with it."""
    process = run.status()["process"]
    there = send(process, signal.SIGKILL if now else signal.SIGTERM)
    print(
        f"run {standing.run}: process {process['pid']} {_DID[now] if there else 'ended just now'}"
    )


_DID = {False: "was asked to save and end", True: "was killed; the last snapshot stands"}
_WHOSE = "only its owner can cancel a job; `squeue -j JOB -o '%i %u %T'` says who that is"
