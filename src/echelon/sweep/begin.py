"""From a file and a command line to a sweep that workers can take trials from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config.check import name_fault
from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.runs import Run
from echelon.sweep.file import Metric, SweepFile
from echelon.sweep.folder import Settings, Sweep
from echelon.sweep.program import subject
from echelon.sweep.search import combinations
from echelon.sweep.space import Parameter
from echelon.sweep.worker import Compose, trial_config

_FOR_THE_SWEEP = {"run.name": "--name", "run.dir": "--dir"}


class Prepared(NamedTuple):
    sweep: Sweep
    settings: Settings
    first: Config
    """Of a trial as it will be."""


def prepare(
    file: SweepFile,
    words: Sequence[str],
    name: str | None,
    root: Path,
    storage: str | None,
    lease_s: float,
    compose: Compose,
) -> Prepared:
    """Checked whole; nothing is written yet."""
    faults = [
        Fault(f"{word} is the same for all trials", f"use {_FOR_THE_SWEEP[key]} instead")
        for word in words
        if (key := word.partition("=")[0]) in _FOR_THE_SWEEP
    ]
    faults += [
        Fault(f"{word}, but the sweep's file has a parameter {key}", "leave one of them out")
        for word in words
        if (key := word.partition("=")[0].removeprefix("experiment.")) in file.parameters
    ]
    chosen = _plain(file.name or file.path.stem) if name is None else name
    if fault := name_fault(chosen):
        faults.append(Fault(fault.what.replace("run.name", "--name"), fault.do))
    if faults:
        raise EchelonError(*faults)
    sweep = Sweep(root.absolute() / chosen)
    what = subject(file, words)
    cap = _cap(file)
    settings = Settings(what.words, what.program, {}, cap)
    first = _checked(settings, file, sweep.run(0), compose)
    metric = file.metric or _metric_of(file, first)
    where = (storage, lease_s, first.launch.kind)
    settings = Settings(what.words, what.program, asdict(metric), cap, 0, *where)
    _require_the_same(sweep, file, settings)
    return Prepared(sweep, settings, first)


def _plain(name: str) -> str:
    """wandb's names of sweeps may have blanks, ours are folders."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)


def _cap(file: SweepFile) -> int:
    size = combinations(file.searched) if file.method == "grid" else math.inf
    cap = min(size, file.run_cap or math.inf)
    if cap is math.inf:
        raise EchelonError(
            Fault(
                f"{file.path}: method: {file.method} without run_cap would never end",
                "say how many trials there shall be:  run_cap: 20",
            )
        )
    return int(cap)


def _metric_of(file: SweepFile, config: Config) -> Metric:
    """Without one, what the trainer goes by."""
    if config.program:
        raise EchelonError(
            Fault(
                f"{file.path}: there is no metric, and a program's is not known",
                "add  metric: {name: loss, goal: minimize}",
            )
        )
    goal = "maximize" if config.trainer.best_is == "max" else "minimize"
    return Metric(f"eval/{config.trainer.best}", goal)


def _checked(settings: Settings, file: SweepFile, run: Run, compose: Compose) -> Config:
    """Composed with a value of every parameter, then with the others, before anything runs."""
    first = {p.name: next(_examples(p)) for p in file.searched}
    config = _composed(settings, file, run, first, compose)
    if not config.program:
        for parameter in file.searched:
            for value in _examples(parameter):
                _composed(settings, file, run, first | {parameter.name: value}, compose)
    return config


def _composed(
    settings: Settings, file: SweepFile, run: Run, values: dict[str, Any], compose: Compose
) -> Config:
    try:
        return trial_config(settings, file, run, values, compose)
    except EchelonError as error:
        raise EchelonError(*(_located(fault, file) for fault in error.faults)) from None


def _located(fault: Fault, file: SweepFile) -> Fault:
    for parameter in file.parameters.values():
        name = parameter.name
        sets = (f"the sweep sets {name}", f"the sweep sets {name!r}")
        if fault.what.startswith((f"{name}=", *sets)):
            return Fault(f"{parameter.at}: {fault.what}", fault.do)
    return fault


def _examples(parameter: Parameter) -> Iterator[Any]:
    if parameter.values:
        yield from parameter.values[:20]
    elif steps := parameter.steps:
        yield from (parameter.at_step(steps.start), parameter.at_step(steps.stop - 1))
    elif parameter.q is not None and float(parameter.q).is_integer():
        yield int(parameter.q)
    else:
        yield _inside(parameter)


def _inside(p: Parameter) -> float:
    kind = p.distribution.removeprefix("q_")
    if kind == "inv_log_uniform":
        return math.exp(-p.min)
    if kind == "log_uniform":
        return math.exp(p.max)
    return p.max if "uniform" in kind else math.exp(p.mu) if kind == "log_normal" else 0.5


def _require_the_same(sweep: Sweep, file: SweepFile, settings: Settings) -> None:
    """A sweep goes on only as the search it was; how many trials it has may change."""
    if Run(sweep.folder).config_file.exists():
        raise EchelonError(
            Fault(f"{sweep.folder} is a run, not a sweep", "choose another name with --name")
        )
    if not sweep.settings_file.exists():
        _require_no_trials(sweep)
        return
    then, now = sweep.file(), file
    before = sweep.settings()
    differs = [
        key
        for key in ("method", "metric", "parameters", "early_terminate")
        if then.data.get(key) != now.data.get(key)
    ]
    differs += [
        key for key in ("program", "storage") if getattr(before, key) != getattr(settings, key)
    ]
    theirs, ours = _deciding(before.words), _deciding(settings.words)
    differs += sorted(set(theirs) ^ set(ours))
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} in {sweep.folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )


def _require_no_trials(sweep: Sweep) -> None:
    """A finished run of the same name would be taken for the result of a trial."""
    for run in sweep.runs():
        raise EchelonError(
            Fault(
                f"{run.folder} is there already, and is no trial of a new sweep {sweep.name}",
                "choose another name with --name, or remove such runs",
            )
        )


def _deciding(words: Sequence[str]) -> list[str]:
    """Where trials run may change; what they are may not."""
    return [word for word in words if not word.startswith(("launch", "track"))]
