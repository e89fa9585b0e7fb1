"""The plan of a sweep: what its file and its command line come to, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config.schema import Config
from echelon.config.validate import check_run_name
from echelon.errors import EchelonError, Fault
from echelon.runs.run_folder import Run
from echelon.sweep.sampling import count_combinations
from echelon.sweep.search_space import SearchParameter
from echelon.sweep.sweep_file import SweepFile, SweepMetric
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_command import resolve_target
from echelon.sweep.worker import Compose, compose_trial_config

_SWEEP_WIDE_SETTINGS = {"run.name": "--name", "run.dir": "--dir"}
"""Settings that all trials share, and the options of the sweep that set them."""


class SweepPlan(NamedTuple):
    """A sweep that can be started."""

    sweep: SweepFolder
    settings: SweepSettings
    first_config: Config
    """The configuration of a trial, with example values."""


def plan_sweep(
    file: SweepFile,
    overrides: Sequence[str],
    name: str | None,
    root: Path,
    storage: str | None,
    lease_s: float,
    compose: Compose,
) -> SweepPlan:
    """Check a sweep and all its parameters, and return the plan. Nothing is written.

    `root` is the folder of all runs; `compose` makes the configuration of a trial.
    """
    faults = [
        Fault(f"{word} is the same for all trials", f"use {_SWEEP_WIDE_SETTINGS[key]} instead")
        for word in overrides
        if (key := word.partition("=")[0]) in _SWEEP_WIDE_SETTINGS
    ]
    faults += [
        Fault(f"{word}, but the sweep's file has a parameter {key}", "leave one of them out")
        for word in overrides
        if (key := word.partition("=")[0].removeprefix("experiment.")) in file.parameters
    ]
    chosen = _to_folder_name(file.name or file.path.stem) if name is None else name
    if fault := check_run_name(chosen):
        faults.append(Fault(fault.what.replace("run.name", "--name"), fault.do))
    if faults:
        raise EchelonError(*faults)
    sweep = SweepFolder(root.absolute() / chosen)
    target = resolve_target(file, overrides)
    settings = SweepSettings(
        target.overrides,
        target.program,
        metric={},
        run_cap=_count_trials(file),
        storage=storage,
        lease_s=lease_s,
    )
    # The metric and the launcher are known only once a trial is composed.
    first_config = _check_parameters_compose(settings, file, sweep.get_trial_run(0), compose)
    metric = file.metric or _get_default_metric(file, first_config)
    launcher = first_config.launch.kind
    settings = replace(settings, metric=asdict(metric), launcher=launcher)
    _require_same_sweep(sweep, file, settings)
    return SweepPlan(sweep, settings, first_config)


def _to_folder_name(name: str) -> str:
    """Return a name for a folder; wandb's names of sweeps may have blanks."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


def _count_trials(file: SweepFile) -> int:
    """Return the number of trials: the size of a grid, at most run_cap."""
    size = count_combinations(file.searched_parameters) if file.method == "grid" else math.inf
    cap = min(size, file.run_cap or math.inf)
    if cap is math.inf:
        raise EchelonError(
            Fault(
                f"{file.path}: method: {file.method} without run_cap would never end",
                "say how many trials there shall be:  run_cap: 20",
            )
        )
    return int(cap)


def _get_default_metric(file: SweepFile, config: Config) -> SweepMetric:
    """Return the metric by which the trainer chooses its best snapshot."""
    if config.program:
        raise EchelonError(
            Fault(
                f"{file.path}: there is no metric, and a program's is not known",
                "add  metric: {name: loss, goal: minimize}",
            )
        )
    goal = "maximize" if config.trainer.best_is == "max" else "minimize"
    return SweepMetric(f"eval/{config.trainer.best}", goal)


def _check_parameters_compose(
    settings: SweepSettings, file: SweepFile, run: Run, compose: Compose
) -> Config:
    """Compose trials with example values of every parameter, so that none fails for them later.

    Return the first configuration. A program's arguments cannot be checked: one is enough.
    """
    first = {p.name: next(_list_example_values(p)) for p in file.searched_parameters}
    config = _compose_trial(settings, file, run, first, compose)
    if not config.program:
        for parameter in file.searched_parameters:
            for value in _list_example_values(parameter):
                _compose_trial(settings, file, run, first | {parameter.name: value}, compose)
    return config


def _compose_trial(
    settings: SweepSettings, file: SweepFile, run: Run, values: dict[str, Any], compose: Compose
) -> Config:
    try:
        return compose_trial_config(settings, file, run, values, compose)
    except EchelonError as error:
        raise EchelonError(*(_add_location(fault, file) for fault in error.faults)) from None


def _add_location(fault: Fault, file: SweepFile) -> Fault:
    """Return the fault with the line of the parameter that it names."""
    for parameter in file.parameters.values():
        name = parameter.name
        sets = (f"the sweep sets {name}", f"the sweep sets {name!r}")
        if fault.what.startswith((f"{name}=", *sets)):
            return Fault(f"{parameter.location}: {fault.what}", fault.do)
    return fault


def _list_example_values(parameter: SearchParameter) -> Iterator[Any]:
    """Yield values that a trial may get: all choices, both ends, or one of a kind."""
    if parameter.values:
        yield from parameter.values[:20]
    elif steps := parameter.step_range:
        yield from (
            parameter.get_value_at_step(steps.start),
            parameter.get_value_at_step(steps.stop - 1),
        )
    elif parameter.q is not None and float(parameter.q).is_integer():
        yield int(parameter.q)
    else:
        yield _choose_example_number(parameter)


def _choose_example_number(p: SearchParameter) -> float:
    kind = p.distribution.removeprefix("q_")
    if kind == "inv_log_uniform":
        return math.exp(-p.min)
    if kind == "log_uniform":
        return math.exp(p.max)
    return p.max if "uniform" in kind else math.exp(p.mu) if kind == "log_normal" else 0.5


def _require_same_sweep(sweep: SweepFolder, file: SweepFile, settings: SweepSettings) -> None:
    """Refuse to continue a sweep as another search; only the number of trials may change."""
    if Run(sweep.folder).config_file.exists():
        raise EchelonError(
            Fault(f"{sweep.folder} is a run, not a sweep", "choose another name with --name")
        )
    if not sweep.settings_file.exists():
        _require_no_trials(sweep)
        return
    old_file, old_settings = sweep.read_file(), sweep.read_settings()
    differs = [
        key
        for key in ("method", "metric", "parameters", "early_terminate")
        if old_file.data.get(key) != file.data.get(key)
    ]
    differs += [
        key
        for key in ("program", "storage")
        if getattr(old_settings, key) != getattr(settings, key)
    ]
    old_overrides = _select_trial_overrides(old_settings.overrides)
    differs += sorted(set(old_overrides) ^ set(_select_trial_overrides(settings.overrides)))
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} in {sweep.folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )


def _require_no_trials(sweep: SweepFolder) -> None:
    """Refuse a new sweep beside runs of these names: a finished one would pass for a trial."""
    for run in sweep.find_trial_runs():
        raise EchelonError(
            Fault(
                f"{run.folder} is there already, and is not a trial of a new sweep {sweep.name}",
                "choose another name with --name, or remove such runs",
            )
        )


def _select_trial_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that decide what trials are; where they run may change."""
    return [word for word in overrides if not word.startswith(("launch", "track"))]
