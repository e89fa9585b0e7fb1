"""`echelon cancel`: ask runs to save and stop, and not to be queued again."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.k8s import kubectl
from echelon.launch.k8s.names import make_resource_name
from echelon.launch.slurm.batch_script import get_warning_signal, may_requeue
from echelon.launch.slurm.requeue import REQUEUE_FILE
from echelon.runs.process_record import is_alive, send_signal
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import get_last_error_line, run_slurm_command
from echelon.runs.status import RunStatus, read_run_statuses
from echelon.runs.writer import find_writing_process


def cancel_runs(runs: Sequence[Run], now: bool, dry_run: bool = False) -> int:
    """Cancel runs, whatever launched them; with ``now``, kill them. Raises EchelonError before
    any of them is touched if one cannot be reached from here. A dry run only says what it would
    do."""
    by_folder = {str(run.folder): run for run in runs}
    statuses, silence = read_run_statuses(by_folder.values())
    faults = [fault for s in statuses if (fault := _check_reachable(s, silence))]
    faults += [fault for s in statuses if now and (fault := _check_now(s))]
    if faults:
        raise EchelonError(*faults)
    if dry_run:
        for status in statuses:
            print(_describe_cancel(status, by_folder[status.folder], now))
        return ExitCode.OK
    active = [s for s in statuses if s.is_active]
    for status in active:
        _mark_cancelled(by_folder[status.folder])
    alone = [s for s in active if s.job and not _is_trial(by_folder[s.folder])]
    _cancel_slurm_jobs(alone, now)
    for status in statuses:
        run = by_folder[status.folder]
        if status.is_active and status.launcher == "k8s":
            _delete_pods(run)
        elif not status.is_active:
            _cancel_unrecorded_process(status, run, now)
        elif not status.job:
            _signal_process(run, run.read_status_file()["process"], now)
        elif status not in alone:
            print(f"run {status.run}: the worker of its sweep was told to end it")
    return ExitCode.OK


def _describe_cancel(status: RunStatus, run: Run, now: bool) -> str:
    """Return what would be done to a run."""
    what = "killed; the last snapshot stands" if now else "asked to save and end"
    if not status.is_active:
        writer = find_writing_process(run)
        if writer is None:
            return f"run {status.run} is not running: it is {status.state}, there is nothing to do"
        return f"run {status.run}: {writer} would be {what}"
    if status.launcher == "k8s":
        return f"run {status.run}: its pods would be {what}, and deleted"
    if status.job and _is_trial(run):
        return f"run {status.run}: the worker of its sweep would be told to end it"
    if status.job:
        is_waiting = status.state in ("queued", "requeued")
        what = "taken out of the queue" if is_waiting else what
        return f"run {status.run}: job {status.job} would be {what}"
    process = run.read_status_file().get("process") or {}
    return f"run {status.run}: process {process.get('pid')} on {status.host} would be {what}"


def requeue_runs(runs: Sequence[Run], dry_run: bool = False) -> int:
    """Ask running Slurm jobs to save and end, as Slurm does before their time is over: their
    scripts then queue them again. Raises EchelonError, before any is touched, for runs that do not
    run there or would not be queued again."""
    by_folder = {str(run.folder): run for run in runs}
    statuses, silence = read_run_statuses(by_folder.values())
    faults = [fault for s in statuses if (fault := _check_reachable(s, silence))]
    faults += [fault for s in statuses if (fault := _find_requeue_fault(s, by_folder[s.folder]))]
    if faults:
        raise EchelonError(*faults)
    for status in statuses:
        what = f"run {status.run}: job {status.job}"
        if dry_run:
            print(f"{what} would be asked to save and end, and to be queued again")
            continue
        config = by_folder[status.folder].read_launch_config()
        signal_name = get_warning_signal(config)
        done = run_slurm_command("scancel", f"--signal={signal_name}", str(status.job))
        if done.returncode:
            raise EchelonError(
                Fault(f"{what} cannot be signalled: {get_last_error_line(done)}", _OWNER_HINT),
                exit=ExitCode.FAILED,
            )
        print(f"{what} was asked to save and end, and to be queued again")
    return ExitCode.OK


def _find_requeue_fault(status: RunStatus, run: Run) -> Fault | None:
    """Return why a run cannot be queued again while it runs; None if it can."""
    if not status.job or status.state != "running":
        return Fault(
            f"run {status.run} does not run as a Slurm job: it is {status.state}",
            f"echelon resume {status.folder}",
        )
    if _is_trial(run) or run.cancel_file.exists():
        return Fault(
            f"run {status.run} is a trial of a sweep, or was asked to end",
            f"echelon resume {status.folder}, once it has ended",
        )
    if not may_requeue(run.read_launch_config()):
        return Fault(
            f"run {status.run} is a program that does not ask to be queued again",
            "start such programs with launch.max_requeues=N, if they can go on by themselves",
        )
    return None


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
    if s.is_active and s.launcher == "k8s":
        return None if shutil.which("kubectl") else _explain_no_kubectl(s)
    process = Run(Path(s.folder)).read_status_file().get("process")
    if s.is_active and not s.job and is_alive(process) is None:
        return Fault(
            f"run {s.run} was started on {s.host}, and can be ended only there",
            f"ssh {s.host} echelon cancel {s.folder}",
        )
    return None


def _explain_no_kubectl(s: RunStatus) -> Fault:
    return Fault(
        f"run {s.run} is in pods of Kubernetes, and there is no kubectl on this machine's PATH",
        f"where there is one and this folder: echelon cancel {s.folder}",
    )


def _check_now(s: RunStatus) -> Fault | None:
    """Return the fault of a run that cannot be killed at once; None if it can."""
    if not (s.is_active and s.launcher == "k8s"):
        return None
    return Fault(
        f"run {s.run} is in pods of Kubernetes, which are always asked to end first",
        "leave --now out: a pod that has not ended after launch.k8s.grace_s is killed",
    )


def _delete_pods(run: Run) -> None:
    """Delete the Job of a run. Its pods are asked to end, and save."""
    name = make_resource_name(run.name)
    try:
        kubectl.delete_objects(run.read_launch_config().launch.k8s, name)
    except EchelonError:
        run.cancel_file.unlink(missing_ok=True)
        raise
    print(f"run {run.name}: its pods were asked to save and end, and are deleted")


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
