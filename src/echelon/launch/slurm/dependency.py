"""`launch.after`: which jobs a run waits for, and whether that can come to an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.config.schema import AFTER_TYPES, Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.find import find_runs
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import query_jobs
from echelon.runs.status import RunStatus, read_run_statuses
from echelon.utils.text import print_to_stderr

_ENDED_WELL = ("COMPLETED",)


def resolve_dependency(config: Config) -> Config:
    """Return the configuration with the jobs that `launch.after` means in its place, as in
    `afterok:12,afterok:14`; with none where all of them are over already.

    Raises an EchelonError for a run that has no job, and for one after whose end this one would
    never start.
    """
    if not config.launch.after:
        return config
    waited_for: list[str] = []
    errors: list[EchelonError] = []
    for item in config.launch.after.split(","):
        kind, _, where = item.rpartition(":")
        try:
            waited_for += _find_jobs(kind or AFTER_TYPES[0], where, config.run.dir)
        except EchelonError as error:
            errors.append(error)
    if errors:
        faults = (fault for error in errors for fault in error.faults)
        raise EchelonError(*faults, exit=max(error.exit for error in errors))
    after = ",".join(dict.fromkeys(waited_for)) or None
    return replace(config, launch=replace(config.launch, after=after))


def resolve_dependencies(configs: Sequence[Config]) -> list[Config]:
    """Return the configurations of runs that are submitted together; those that wait for the same
    are resolved once."""
    resolved: dict[str | None, str | None] = {}
    for config in configs:
        if config.launch.after not in resolved:
            resolved[config.launch.after] = resolve_dependency(config).launch.after
    return [
        replace(config, launch=replace(config.launch, after=resolved[config.launch.after]))
        for config in configs
    ]


def _find_jobs(kind: str, where: str, root: str) -> list[str]:
    """Return the dependencies, each `TYPE:JOB`, on what a person calls by a name or a number."""
    try:
        runs = find_runs(where, root)
    except EchelonError as error:
        if not where.partition("_")[0].isdecimal():
            what, do = error.faults[0]
            fault = Fault(f"launch.after={where}: {what}", do)
            raise EchelonError(fault, exit=error.exit) from None
        return _check_job(kind, where)
    return _check_runs(kind, where, runs)


def _check_runs(kind: str, where: str, runs: Sequence[Run]) -> list[str]:
    """Return the dependencies on runs of ours, which know more of their end than Slurm does."""
    statuses, _ = read_run_statuses(runs)
    faults = [fault for status in statuses if (fault := _find_run_fault(kind, status))]
    if faults:
        raise EchelonError(*faults)
    jobs = [status.job for status in statuses if status.is_active and status.job]
    if not jobs:
        _say_that_it_is_over(where, f"run {where} is {statuses[0].state}")
    if len(runs) > 1:  # tasks of an array are named at once: there may be a thousand
        jobs = [job.partition("_")[0] for job in jobs]
    return [f"{kind}:{job}" for job in sorted(set(jobs))]


def _find_run_fault(kind: str, status: RunStatus) -> Fault | None:
    """Return why no job can wait for this run, if so."""
    if status.is_active:
        if status.job:
            return None
        return Fault(
            f"launch.after: run {status.run} has no job that Slurm knows (it is {status.state}, "
            f"launch={status.launcher})",
            f"start this one when it is over: `echelon attach {status.run} && …`",
        )
    if kind == "afterany" or (kind == "afterok") == (status.state == "finished"):
        return None
    note = f" ({status.note})" if status.note else ""
    return _make_never_fault(
        kind,
        f"run {status.run} is {status.state}{note}",
        f"`echelon resume {status.run}` goes on with it; or",
        status.run,
    )


def _check_job(kind: str, job: str) -> list[str]:
    """Return the dependency on a job that is no run of ours, unless it is over."""
    answer = query_jobs([job])
    if answer.error:  # a plan is shown on machines without Slurm too; sbatch has the last word
        return [f"{kind}:{job}"]
    tasks = [s for name, s in answer.states.items() if job in (name, name.partition("_")[0])]
    if any(state.is_active for state in tasks):
        return [f"{kind}:{job}"]
    if not tasks:
        raise EchelonError(
            Fault(
                f"launch.after={job}: there is no such run, and Slurm knows no job {job}",
                "Slurm soon forgets jobs that are over; then leave launch.after out",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    states = sorted({state.state for state in tasks})
    is_well = all(state in _ENDED_WELL for state in states)
    if kind != "afterany" and (kind == "afterok") != is_well:
        what = f"job {job} is over ({', '.join(states)})"
        raise EchelonError(_make_never_fault(kind, what, "", job))
    _say_that_it_is_over(job, f"job {job} is over")
    return []


def _make_never_fault(kind: str, what: str, instead: str, where: str) -> Fault:
    """Return the fault of a job that would never start."""
    wanted = "fails" if kind == "afternotok" else "has finished"
    return Fault(
        f"launch.after: {what}, so a job that starts when it {wanted} would never start",
        f"{instead} leave launch.after out, or write launch.after=afterany:{where}".strip(),
    )


def _say_that_it_is_over(where: str, what: str) -> None:
    print_to_stderr(f"launch.after={where}: {what} already, so nothing is waited for")
