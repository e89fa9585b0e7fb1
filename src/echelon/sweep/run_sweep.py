"""`echelon sweep FILE`: read it, check it, and run its trials where the launcher says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, Exit, Fault
from echelon.sweep import slurm_workers
from echelon.sweep.display import open_progress, print_report
from echelon.sweep.optuna_study import require_optuna
from echelon.sweep.plan import SweepPlan, plan_sweep
from echelon.sweep.report import build_report
from echelon.sweep.search_space import SearchParameter
from echelon.sweep.supervisor import supervise_workers
from echelon.sweep.sweep_file import SweepFile, read_sweep_file
from echelon.sweep.sweep_folder import SweepFolder, find_sweep
from echelon.sweep.trial_command import format_value
from echelon.sweep.trial_store import TrialStore
from echelon.sweep.worker import Compose

StartRun = Callable[..., int]
_SHOWN_BANDS = 4
"""Shown of those at which trials are compared; with min_iter there is no last one."""


class SweepOptions(NamedTuple):
    parallel: int
    name: str | None
    root: Path
    storage: str | None
    lease_s: float
    dry_run: bool
    as_json: bool
    wait: bool
    engine: str


def run_sweep(
    path: Path, overrides: Sequence[str], options: SweepOptions, compose: Compose, start: StartRun
) -> int:
    file = read_sweep_file(path)
    for note in file.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.engine == "wandb" and options.storage:
        raise EchelonError(
            Fault(
                "--storage is where Optuna keeps results, and with --engine wandb the server does",
                "leave one of them out",
            )
        )
    where = (options.name, options.root, options.storage, options.lease_s)
    plan = plan_sweep(file, overrides, *where, compose)
    on_slurm = plan.first_config.launch.kind == "slurm" and options.engine == "embedded"
    options = options._replace(parallel=min(options.parallel, plan.settings.cap))
    if options.dry_run:
        return _print_plan(file, plan, options, start, on_slurm)
    if plan.first_config.launch.kind == "env":
        raise EchelonError(
            Fault("launch=env is typed on every node, and a sweep is typed once", "use launch=ssh")
        )
    if options.engine == "wandb":
        from echelon.sweep.wandb.engine import run_agents

        return run_agents(file, plan, options.parallel, options.as_json)
    if plan.sweep.server_file.exists():
        raise EchelonError(
            Fault(
                f"the sweep {plan.sweep.name} in {plan.sweep.folder} is on wandb's server",
                "go on with it with --engine wandb, or choose another name with --name",
            )
        )
    require_optuna(options.storage)
    if on_slurm:
        slurm_workers.check_submittable(plan, options.parallel)
    plan.sweep.write_files(plan.settings, path.read_text(encoding="utf-8"))
    if on_slurm:
        return _submit_workers(plan, options)
    return _run_here(plan, options)


def show_sweep(name: str, root: str, as_json: bool, show_all: bool, plot_file: str | None) -> int:
    """`echelon sweep show`, whoever searches."""
    sweep = find_sweep(name, root)
    if sweep.server_file.exists():
        from echelon.sweep.wandb.report import build_server_report

        report_shown = build_server_report(sweep)
    else:
        report_shown = build_report(TrialStore(sweep))
    return print_report(report_shown, as_json, show_all, Path(plot_file) if plot_file else None)


def _run_here(plan: SweepPlan, options: SweepOptions) -> int:
    with open_progress() as screen:
        code = supervise_workers(plan.sweep, options.parallel, screen.update)
    if code == Exit.OK:
        return _report_outcome(plan.sweep, options.as_json)
    print_report(build_report(TrialStore(plan.sweep)), options.as_json)
    print("the same command goes on with this sweep", file=sys.stderr)
    return code


def _report_outcome(sweep: SweepFolder, as_json: bool) -> int:
    """Of a sweep whose workers are gone by themselves."""
    outcome = build_report(TrialStore(sweep))
    print_report(outcome, as_json)
    if outcome.stop_reason and outcome.best is None:
        what, do = f"ended: {outcome.stop_reason}", "mend it and choose another --name"
    elif not outcome.stop_reason and outcome.ended_count < outcome.run_cap:
        what = (
            f"is not over, but its workers are: {outcome.ended_count} of {outcome.run_cap} results"
        )
        do = f"see {sweep.logs}; the same command goes on with it"
    else:
        return Exit.OK
    raise EchelonError(Fault(f"the sweep {sweep.name} {what}", do), exit=Exit.FAILED)


def _submit_workers(plan: SweepPlan, options: SweepOptions) -> int:
    sweep = plan.sweep
    TrialStore(sweep)  # made here, so that no worker has to wait for another
    job = slurm_workers.submit_workers(plan, options.parallel)
    workers = f"{options.parallel} worker{'s' * (options.parallel > 1)}"
    print(f"job {job}: {workers} of sweep {sweep.name} in {sweep.folder}")
    if not options.wait:
        print(f"  look at it  echelon sweep show {sweep.name}")
        return Exit.OK
    slurm_workers.follow_workers(sweep)
    return _report_outcome(sweep, options.as_json)


def _print_plan(
    file: SweepFile, plan: SweepPlan, options: SweepOptions, start: StartRun, on_slurm: bool
) -> int:
    """What would happen, of the first trial in full."""
    settings, sweep = plan.settings, plan.sweep
    if options.as_json:
        data = {
            "sweep": sweep.name,
            "folder": str(sweep.folder),
            "method": file.method,
            "metric": settings.metric,
            "run_cap": settings.cap,
            "bands": list(file.early_terminate.bands) if file.early_terminate else None,
            "parameters": {p.name: p.distribution for p in file.parameters.values()},
            "words": settings.words,
            "program": settings.program,
            "script": slurm_workers.render_script(plan, options.parallel) if on_slurm else None,
        }
        print(json.dumps(data, indent=2))
        return Exit.OK
    print(
        f"sweep {sweep.name}: {settings.cap:,} trials, {options.parallel} at once, in {sweep.folder}"
    )
    goal = "largest" if settings.metric["goal"] == "maximize" else "smallest"
    who = " on wandb's server" if options.engine == "wandb" else ""
    print(f"{file.method} for the {goal} {settings.metric['name']}{who}")
    if file.early_terminate:
        more = ", …" if len(file.early_terminate.bands) > _SHOWN_BANDS else ""
        bands = ", ".join(map(str, file.early_terminate.bands[:_SHOWN_BANDS])) + more
        print(f"after {bands} evaluations the best 1/{file.early_terminate.eta:g} go on")
    width = max(len(name) for name in file.parameters)
    for p in file.parameters.values():
        print(f"  {p.name:<{width}}  {p.distribution} {_describe_range(p)}")
    if on_slurm:
        print(f"\n{slurm_workers.render_script(plan, options.parallel)}")
        return Exit.OK
    print("\nA trial:")
    return start(plan.first_config, dry_run=True)


def _describe_range(parameter: SearchParameter) -> str:
    if parameter.values:
        return ", ".join(format_value(value) for value in parameter.values)
    if parameter.distribution.endswith("normal"):
        return f"mu {parameter.mu:g}, sigma {parameter.sigma:g}"
    return f"{parameter.min:g} to {parameter.max:g}"
