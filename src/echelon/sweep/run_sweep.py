"""`echelon sweep`: run or continue a sweep, here, on Slurm or with wandb's server, or show it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.run_folder import Run
from echelon.sweep.display import open_progress, print_report
from echelon.sweep.located_yaml import load_yaml
from echelon.sweep.optuna_study import require_optuna
from echelon.sweep.plan import SweepPlan, plan_sweep
from echelon.sweep.report import SweepReport, build_report
from echelon.sweep.search_space import SearchParameter
from echelon.sweep.slurm_workers import (
    WorkerArray,
    check_submittable,
    find_active_jobs,
    submit_workers,
)
from echelon.sweep.supervisor import supervise_workers
from echelon.sweep.sweep_file import SweepFile, inspect_sweep
from echelon.sweep.sweep_folder import SweepFolder, find_sweep
from echelon.sweep.trial_command import format_override_value
from echelon.sweep.trial_store import TrialStore, TrialSummary
from echelon.sweep.worker import Compose
from echelon.utils.text import format_count

StartRun = Callable[..., int]
SubmitElsewhere = Callable[[SweepFile, SweepPlan, "SweepOptions"], int]
_UPDATE_S = 1.0
_LOOK_EVERY_S = 5.0
_SHOWN_BANDS = 4
"""So many bands of hyperband are shown; with min_iter there is no last one."""


class SweepOptions(NamedTuple):
    """The options of the command."""

    parallel: int
    """Trials at once."""
    name: str | None
    root: Path
    """The folder of all runs."""
    storage: str | None
    lease_s: float
    dry_run: bool
    as_json: bool
    wait: bool
    engine: str
    """embedded (Optuna) or wandb."""


def run_sweep(
    path: Path,
    overrides: Sequence[str],
    options: SweepOptions,
    compose: Compose,
    start: StartRun,
    submit_elsewhere: SubmitElsewhere,
) -> int:
    """Run a sweep to its end, or continue it, and return the exit code.

    `compose` makes the configuration of a trial, `start` starts one run (for --dry-run).
    `submit_elsewhere` gives the sweep to the login node that `launch.login` names.
    """
    file, faults = inspect_sweep(load_yaml(path))
    for note in file.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.engine == "wandb" and options.storage:
        faults.append(
            Fault(
                "--storage is where Optuna keeps results, and with --engine wandb the server does",
                "leave one of them out",
            )
        )
    plan = plan_sweep(
        file,
        overrides,
        options.name,
        options.root,
        options.storage,
        options.lease_s,
        compose,
        faults,
    )
    is_on_slurm = plan.first_config.launch.kind == "slurm" and options.engine == "embedded"
    options = options._replace(parallel=min(options.parallel, plan.settings.run_cap))
    if plan.first_config.launch.login is not None:
        return submit_elsewhere(file, plan, options)
    workers = WorkerArray(plan.sweep, plan.first_config, plan.settings.overrides, options.parallel)
    if options.dry_run:
        script = workers.render_script() if is_on_slurm else None
        return print_plan(file, plan, options, start, script)
    if plan.first_config.launch.kind == "env":
        raise EchelonError(
            Fault("launch=env is run on every node, and a sweep is run once", "use launch=ssh")
        )
    if plan.first_config.launch.kind == "k8s":
        raise EchelonError(
            Fault(
                "launch=k8s queues a run and ends, and a sweep has to follow its trials",
                "use launch=slurm, ssh or local; `echelon train -m` queues a run for each "
                "combination of settings",
            )
        )
    if options.engine == "wandb":
        from echelon.sweep.wandb.engine import run_agents

        return run_agents(file, plan, options.parallel, options.as_json)
    if plan.sweep.server_file.exists():
        raise EchelonError(
            Fault(
                f"the sweep {plan.sweep.name} in {plan.sweep.folder} is on wandb's server",
                "continue it with --engine wandb, or choose another name with --name",
            )
        )
    require_optuna(options.storage)
    if is_on_slurm:
        check_submittable(workers)
    plan.sweep.write_files(plan.settings, path.read_text(encoding="utf-8"))
    if is_on_slurm:
        return _submit_workers(workers, options)
    return _run_here(plan, options)


def show_sweep(name: str, root: str, as_json: bool, show_all: bool, plot_file: str | None) -> int:
    """Print a sweep, and plot it into a file if one is given; return the exit code."""
    report = read_report(find_sweep(name, root))
    return print_report(report, as_json, show_all, Path(plot_file) if plot_file else None)


def read_report(sweep: SweepFolder, with_importance: bool = True) -> SweepReport:
    """Return the report of a sweep that is searched here, on a cluster, or by wandb's server."""
    if sweep.server_file.exists():
        from echelon.sweep.wandb.local_report import build_report_from_records

        return build_report_from_records(sweep)
    if not has_study(sweep):
        return SweepReport(sweep, sweep.read_metric(), sweep.read_settings().run_cap, [], {}, "")
    return build_report(TrialStore(sweep), with_importance)


def has_study(sweep: SweepFolder) -> bool:
    """Return whether there are trials to read. Of a sweep on a cluster the journal is a copy: it
    must not be begun here before that of the first worker has come."""
    if not Run(sweep.folder).origin_file.exists():
        return True
    with contextlib.suppress(OSError), sweep.journal_file.open("rb") as file:
        return file.readline().endswith(b"\n")
    return False


def _run_here(plan: SweepPlan, options: SweepOptions) -> int:
    """Run workers on this machine to the end of the sweep."""
    earlier_trials = TrialStore(plan.sweep).summarize_trials()
    with open_progress(earlier_trials) as progress:
        code = supervise_workers(plan.sweep, options.parallel, progress.update)
    if code == ExitCode.OK:
        return report_outcome(plan.sweep, options.as_json)
    print_report(build_report(TrialStore(plan.sweep)), options.as_json)
    print("the same command continues this sweep", file=sys.stderr)
    return code


def report_outcome(sweep: SweepFolder, as_json: bool) -> int:
    """Print a sweep whose workers have ended by themselves, and return the exit code."""
    report = read_report(sweep)
    print_report(report, as_json)
    if report.stop_reason and report.best is None:
        what, do = f"ended: {report.stop_reason}", "fix it and choose another --name"
    elif not report.stop_reason and report.ended_count < report.run_cap:
        what = f"is not over, but its workers are: {report.ended_count} of {report.run_cap} results"
        do = f"see {sweep.logs}; the same command continues it"
    else:
        return ExitCode.OK
    raise EchelonError(Fault(f"the sweep {sweep.name} {what}", do), exit=ExitCode.FAILED)


def _submit_workers(workers: WorkerArray, options: SweepOptions) -> int:
    """Submit an array of workers, and follow it if asked to."""
    sweep = workers.sweep
    # This also creates the study, so that no worker waits for another to do it.
    earlier_trials = TrialStore(sweep).summarize_trials()
    job = submit_workers(workers)
    counted = format_count(options.parallel, "worker")
    print(f"job {job}: {counted} of sweep {sweep.name} in {sweep.folder}")
    if not options.wait:
        print(f"  look at it  echelon sweep show {sweep.name}")
        return ExitCode.OK
    follow_workers(sweep, earlier_trials, lambda: find_active_jobs(sweep) == [])
    return report_outcome(sweep, options.as_json)


def follow_workers(
    sweep: SweepFolder, earlier_trials: Sequence[TrialSummary], are_over: Callable[[], bool]
) -> None:
    """Show the progress beyond `earlier_trials` until no worker waits or runs."""
    store, asked_at, is_over = TrialStore(sweep), time.monotonic(), False
    with open_progress(earlier_trials) as progress:
        while not is_over:
            progress.update(store)
            time.sleep(_UPDATE_S)
            if time.monotonic() - asked_at > _LOOK_EVERY_S:
                asked_at, is_over = time.monotonic(), are_over()
        progress.update(store)


def print_plan(
    file: SweepFile, plan: SweepPlan, options: SweepOptions, start: StartRun, script: str | None
) -> int:
    """Print what would happen: the search, and the script of the workers or the first trial."""
    settings, sweep = plan.settings, plan.sweep
    if options.as_json:
        data = {
            "sweep": sweep.name,
            "folder": str(sweep.folder),
            "method": file.method,
            "metric": settings.metric,
            "run_cap": settings.run_cap,
            "bands": list(file.early_terminate.bands) if file.early_terminate else None,
            "parameters": {p.name: p.distribution for p in file.parameters.values()},
            "words": settings.overrides,
            "program": settings.program,
            "script": script,
        }
        print(json.dumps(data, indent=2))
        return ExitCode.OK
    size = f"{settings.run_cap:,} trials, {options.parallel} at once"
    print(f"sweep {sweep.name}: {size}, in {sweep.folder}")
    goal = "largest" if settings.metric["goal"] == "maximize" else "smallest"
    engine = " on wandb's server" if options.engine == "wandb" else ""
    print(f"{file.method} for the {goal} {settings.metric['name']}{engine}")
    if hyperband := file.early_terminate:
        more = ", …" if len(hyperband.bands) > _SHOWN_BANDS else ""
        bands = ", ".join(map(str, hyperband.bands[:_SHOWN_BANDS])) + more
        print(f"after {bands} evaluations the best 1/{hyperband.eta:g} continue")
    width = max(len(name) for name in file.parameters)
    for p in file.parameters.values():
        print(f"  {p.name:<{width}}  {p.distribution} {_describe_range(p)}")
    if script is not None:
        print(f"\n{script}")
        return ExitCode.OK
    print("\nA trial:")
    return start(plan.first_config, dry_run=True)


def _describe_range(parameter: SearchParameter) -> str:
    if parameter.values:
        return ", ".join(format_override_value(value) for value in parameter.values)
    if parameter.distribution.endswith("normal"):
        return f"mu {parameter.mu:g}, sigma {parameter.sigma:g}"
    return f"{parameter.min:g} to {parameter.max:g}"
