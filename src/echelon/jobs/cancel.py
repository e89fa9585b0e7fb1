"""`echelon cancel`: ask runs to save and stop, and not to be queued again."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm.requeue import REQUEUE_FILE
from echelon.runs.process_record import is_alive, send_signal
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import get_last_error_line, run_slurm_command
from echelon.runs.status import RunStatus, read_run_statuses
from echelon.runs.writer import find_writing_process


def cancel_runs(runs: Sequence[Run], now: bool) -> int:
    """Cancel runs, whatever launched them; with ``now``, kill them. Raises EchelonError before
    any of them is touched if one cannot be reached from here."""
    by_folder = {str(run.folder): run for run in runs}
    statuses, silence = read_run_statuses(by_folder.values())
    faults = [fault for s in statuses if (fault := _check_reachable(s, silence))]
    if faults:
        raise EchelonError(*faults)
    active = [s for s in statuses if s.is_active]
    for status in active:
        _mark_cancelled(by_folder[status.folder])
    alone = [s for s in active if s.job and not _is_trial(by_folder[s.folder])]
    _cancel_slurm_jobs(alone, now)
    for status in statuses:
        run = by_folder[status.folder]
        if not status.is_active:
            _cancel_unrecorded_process(status, run, now)
        elif not status.job:
            _signal_process(run, run.read_status_file()["process"], now)
        elif status not in alone:
            print(f"run {status.run}: the worker of its sweep was told to end it")
    return ExitCode.OK


def _is_trial(run: Run) -> bool:
    """Return whether the run is a trial of a sweep's worker, whose job other trials need as
    well."""
    return bool(run.read_status_file().get("in_sweep"))


def _check_reachable(s: RunStatus, silence: str) -> Fault | None:
    """Return the fault of a run that cannot be cancelled from this machine; None if it can."""
    if s.is_active and s.job and silence:
        return Fault(
            f"run {s.run} is job {s.job}, but Slurm does not answer: {silence}",
            "type it on a login node, or again when Slurm is back",
        )
    if s.is_active and s.launcher == "slurm" and not s.job:
        return Fault(f"run {s.run} has no job number yet", "wait for the command that submits it")
    process = Run(Path(s.folder)).read_status_file().get("process")
    if s.is_active and not s.job and is_alive(process) is None:
        return Fault(
            f"run {s.run} was started on {s.host}, and can be ended only there",
            f"ssh {s.host} echelon cancel {s.folder}",
        )
    return None


def _mark_cancelled(run: Run) -> None:
    """Mark the run as cancelled before anything else, so that it is not queued again meanwhile."""
    run.cancel_file.touch()
    (run.folder / REQUEUE_FILE).unlink(missing_ok=True)


def _cancel_slurm_jobs(statuses: Sequence[RunStatus], now: bool) -> None:
    """Cancel jobs. On TERM ranks save; KILL comes after Slurm's KillWait, or at once with
    ``now``."""
    jobs = [str(s.job) for s in statuses]
    if jobs and now:
        run_slurm_command("scancel", "--quiet", "--signal=KILL", *(f"{job}.0" for job in jobs))
    if jobs and (done := run_slurm_command("scancel", *jobs)).returncode:
        for status in statuses:
            Run(Path(status.folder)).cancel_file.unlink(missing_ok=True)
        raise EchelonError(
            Fault(
                f"Slurm does not cancel job {', '.join(jobs)}: {get_last_error_line(done)}",
                _OWNER_HINT,
            ),
            exit=ExitCode.FAILED,
        )
    for s in statuses:
        waited = s.state in ("queued", "requeued")
        print(f"run {s.run}: job {s.job} " + ("left the queue" if waited else _OUTCOMES[now]))


def _cancel_unrecorded_process(status: RunStatus, run: Run, now: bool) -> None:
    """End a process that writes into the folder although the status says that the run is over: it
    has only begun, is closing its trackers, or the status is damaged. Usually there is none."""
    writer = find_writing_process(run)
    if writer is None:
        note = f" ({status.note})" if status.note else ""
        print(
            f"run {status.run} was not running: it is {status.state}{note}, "
            "there is nothing to cancel"
        )
    elif is_alive(writer.process) is None:
        raise EchelonError(
            Fault(
                f"run {status.run} is {status.state}, but {writer} writes into its folder",
                f"ssh {writer.process.get('host', 'HOST')} echelon cancel {status.folder}",
            )
        )
    else:
        _mark_cancelled(run)
        _signal_process(run, writer.process, now)


def _signal_process(run: Run, process: Mapping[str, Any], now: bool) -> None:
    """Signal the process that the run depends on; workers end with it."""
    there = send_signal(process, signal.SIGKILL if now else signal.SIGTERM)
    print(
        f"run {run.name}: process {process['pid']} {_OUTCOMES[now] if there else 'ended just now'}"
    )


_OUTCOMES = {False: "was asked to save and end", True: "was killed; the last snapshot stands"}
_OWNER_HINT = "only its owner can cancel a job; `squeue -j JOB -o '%i %u %T'` says who that is"
