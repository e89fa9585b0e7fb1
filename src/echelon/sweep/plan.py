"""From a file and a command line to a sweep that workers can take trials from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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


class SweepPlan(NamedTuple):
    sweep: SweepFolder
    settings: SweepSettings
    first_config: Config
    """Of a trial as it will be."""


def plan_sweep(
    file: SweepFile,
    overrides: Sequence[str],
    name: str | None,
    root: Path,
    storage: str | None,
    lease_s: float,
    compose: Compose,
) -> SweepPlan:
    """Checked whole; nothing is written yet."""
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
    what = resolve_target(file, overrides)
    cap = _count_trials(file)
    settings = SweepSettings(what.overrides, what.program, {}, cap)
    first = _check_parameters_compose(settings, file, sweep.trial_run(0), compose)
    metric = file.metric or _default_metric(file, first)
    where = (storage, lease_s, first.launch.kind)
    settings = SweepSettings(what.overrides, what.program, asdict(metric), cap, 0, *where)
    _require_same_sweep(sweep, file, settings)
    return SweepPlan(sweep, settings, first)


def _to_folder_name(name: str) -> str:
    """wandb's names of sweeps may have blanks, ours are folders."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


def _count_trials(file: SweepFile) -> int:
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


def _default_metric(file: SweepFile, config: Config) -> SweepMetric:
    """Without one, what the trainer goes by."""
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
    """Composed with a value of every parameter, then with the others, before anything runs."""
    first = {p.name: next(_example_values(p)) for p in file.searched_parameters}
    config = _compose_trial(settings, file, run, first, compose)
    if not config.program:
        for parameter in file.searched_parameters:
            for value in _example_values(parameter):
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
    for parameter in file.parameters.values():
        name = parameter.name
        sets = (f"the sweep sets {name}", f"the sweep sets {name!r}")
        if fault.what.startswith((f"{name}=", *sets)):
            return Fault(f"{parameter.location}: {fault.what}", fault.do)
    return fault


def _example_values(parameter: SearchParameter) -> Iterator[Any]:
    if parameter.values:
        yield from parameter.values[:20]
    elif steps := parameter.steps:
        yield from (parameter.value_at_step(steps.start), parameter.value_at_step(steps.stop - 1))
    elif parameter.q is not None and float(parameter.q).is_integer():
        yield int(parameter.q)
    else:
        yield _example_number(parameter)


def _example_number(p: SearchParameter) -> float:
    kind = p.distribution.removeprefix("q_")
    if kind == "inv_log_uniform":
        return math.exp(-p.min)
    if kind == "log_uniform":
        return math.exp(p.max)
    return p.max if "uniform" in kind else math.exp(p.mu) if kind == "log_normal" else 0.5


def _require_same_sweep(sweep: SweepFolder, file: SweepFile, settings: SweepSettings) -> None:
    """A sweep goes on only as the search it was; how many trials it has may change."""
    if Run(sweep.folder).config_file.exists():
        raise EchelonError(
            Fault(f"{sweep.folder} is a run, not a sweep", "choose another name with --name")
        )
    if not sweep.settings_file.exists():
        _require_no_trials(sweep)
        return
    old_file, now = sweep.read_file(), file
    old_settings = sweep.read_settings()
    differs = [
        key
        for key in ("method", "metric", "parameters", "early_terminate")
        if old_file.data.get(key) != now.data.get(key)
    ]
    differs += [
        key
        for key in ("program", "storage")
        if getattr(old_settings, key) != getattr(settings, key)
    ]
    theirs, ours = _search_overrides(old_settings.words), _search_overrides(settings.words)
    differs += sorted(set(theirs) ^ set(ours))
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} in {sweep.folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )


def _require_no_trials(sweep: SweepFolder) -> None:
    """A finished run of the same name would be taken for the result of a trial."""
    for run in sweep.find_trial_runs():
        raise EchelonError(
            Fault(
                f"{run.folder} is there already, and is no trial of a new sweep {sweep.name}",
                "choose another name with --name, or remove such runs",
            )
        )


def _search_overrides(overrides: Sequence[str]) -> list[str]:
    """Where trials run may change; what they are may not."""
    return [word for word in overrides if not word.startswith(("launch", "track"))]
