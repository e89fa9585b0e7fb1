"""The plan of a sweep: what its file and its command line come to, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from echelon.config.schema import Config
from echelon.config.untrusted import check_values
from echelon.config.validate import check_run_name
from echelon.errors import EchelonError, Fault
from echelon.launch.slurm.dependency import resolve_dependency
from echelon.runs.metric_direction import guess_best_is
from echelon.runs.run_folder import Run
from echelon.sweep.same_sweep import require_same_sweep
from echelon.sweep.sampling import count_combinations
from echelon.sweep.search_space import SearchParameter
from echelon.sweep.sweep_file import METHODS, SweepFile, SweepMetric
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_command import resolve_target
from echelon.sweep.worker import Compose, compose_trial_config

P = ParamSpec("P")
T = TypeVar("T")

_SWEEP_WIDE_SETTINGS = {"run.name": "--name", "run.dir": "--dir"}
"""Settings that all trials share, and the options of the sweep that set them."""


class SweepPlan(NamedTuple):
    """A sweep that can be started."""

    sweep: SweepFolder
    settings: SweepSettings
    first_config: Config
    """The configuration of a trial, with example values."""


@dataclass
class _FaultList:
    """The faults that were found so far: one does not keep the next from being looked for."""

    faults: list[Fault]

    def collect(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Call a function and return its result, or None after its faults were added."""
        try:
            return function(*args, **named)
        except EchelonError as error:
            self.faults += [fault for fault in error.faults if fault not in self.faults]
            return None

    def raise_any(self) -> None:
        """Raise all faults at once, if there are any."""
        if self.faults:
            raise EchelonError(*self.faults)


def plan_sweep(
    file: SweepFile,
    overrides: Sequence[str],
    name: str | None,
    root: Path,
    storage: str | None,
    lease_s: float,
    compose: Compose,
    faults: Sequence[Fault] = (),
) -> SweepPlan:
    """Check a sweep and all its parameters, and return the plan. Nothing is written.

    `root` is the folder of all runs; `compose` makes the configuration of a trial. `faults` were
    found in the file before, so that it may be readable in parts only; they are raised together
    with those that are found here.
    """
    override_faults = _find_override_faults(file, overrides)
    overrides = [word for word in overrides if word not in override_faults]
    found = _FaultList([*faults, *override_faults.values()])
    chosen = _to_folder_name(file.name or file.path.stem) if name is None else name
    if fault := check_run_name(chosen):
        found.faults.append(Fault(fault.what.replace("run.name", "--name"), fault.do))
        chosen = "unnamed"  # the same fault would be found in every trial
    sweep = SweepFolder(root.absolute() / chosen)
    run_cap = found.collect(_count_trials, file) if _can_count_trials(file, bool(faults)) else None
    is_target_readable = _is_readable(file, "program") and _is_readable(file, "command")
    target = found.collect(resolve_target, file, overrides) if is_target_readable else None
    if target is None:
        found.raise_any()
    assert target is not None
    settings = SweepSettings(
        target.overrides,
        target.program,
        metric={},
        run_cap=run_cap or 0,
        storage=storage,
        lease_s=lease_s,
    )
    # The metric and the launcher are known only once a trial is composed.
    first_config = _compose_examples(settings, file, sweep.get_trial_run(0), compose, found)
    metric = file.metric
    if first_config is not None and metric is None and _is_readable(file, "metric"):
        metric = found.collect(_get_default_metric, file, first_config)
    found.raise_any()
    assert first_config is not None
    assert metric is not None
    launcher = first_config.launch.kind
    settings = replace(settings, metric=asdict(metric), launcher=launcher)
    require_same_sweep(sweep, file, settings)
    if first_config.launch.login is None:  # else what it waits for is known there
        first_config = resolve_dependency(first_config)
    return SweepPlan(sweep, settings, first_config)


def _find_override_faults(file: SweepFile, overrides: Sequence[str]) -> dict[str, Fault]:
    """Return words of the command line that a sweep has another place for, with their faults."""
    faults = {}
    for word in overrides:
        key = word.partition("=")[0]
        if key in _SWEEP_WIDE_SETTINGS:
            hint = f"use {_SWEEP_WIDE_SETTINGS[key]} instead"
            faults[word] = Fault(f"{word} is the same for all trials", hint)
        elif (name := key.removeprefix("experiment.")) in file.parameters:
            what = f"{word}, but the sweep's file has a parameter {name}"
            faults[word] = Fault(what, "leave one of them out")
    return faults


def _is_readable(file: SweepFile, key: str) -> bool:
    """Return whether a key of the file is either missing or without a fault."""
    return file.data.get(key) is None or getattr(file, key) is not None


def _can_count_trials(file: SweepFile, has_faults: bool) -> bool:
    """Return whether the number of trials can be told of a file that may be readable in parts.

    A grid with a faulty parameter has no size.
    """
    if file.method not in METHODS or not _is_readable(file, "run_cap"):
        return False
    return file.method != "grid" or not has_faults


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
    name, best_is = config.trainer.best, config.trainer.best_is
    known = guess_best_is(name) if best_is == "auto" else best_is
    if known is None:
        raise EchelonError(
            Fault(
                f"{file.path}: there is no metric, and whether more or less of "
                f"trainer.best={name} is better is not known",
                f"add  metric: {{name: eval/{name}, goal: maximize}}, or set trainer.best_is",
            )
        )
    return SweepMetric(f"eval/{name}", "maximize" if known == "max" else "minimize")


def _compose_examples(
    settings: SweepSettings, file: SweepFile, run: Run, compose: Compose, found: _FaultList
) -> Config | None:
    """Compose trials with example values of every parameter, so that none fails for them later.

    Return the first configuration, or None where it has faults. A program's arguments cannot be
    checked: one is enough.
    """
    if not settings.program:
        file = _drop_refused_parameters(file, found)
    first = {p.name: next(_list_example_values(p)) for p in file.searched_parameters}
    config = found.collect(_compose_trial, settings, file, run, first, compose)
    if not settings.program:
        for parameter in file.searched_parameters:
            for value in _list_example_values(parameter):
                values = first | {parameter.name: value}
                found.collect(_compose_trial, settings, file, run, values, compose)
    return config


def _drop_refused_parameters(file: SweepFile, found: _FaultList) -> SweepFile:
    """Return the file without the parameters that no sweep may set, whose faults are added: the
    others are checked all the same."""
    kept = {}
    for key, parameter in file.parameters.items():
        count = len(found.faults)
        for value in _list_example_values(parameter):
            found.collect(_check_parameter, file, parameter.name, value)
        if len(found.faults) == count:
            kept[key] = parameter
    return replace(file, parameters=kept)


def _check_parameter(file: SweepFile, name: str, value: Any) -> None:
    try:
        check_values({name: value})
    except EchelonError as error:
        raise EchelonError(*(_add_location(fault, file) for fault in error.faults)) from None


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
