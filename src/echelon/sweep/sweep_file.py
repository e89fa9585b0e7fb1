"""The file of a sweep, in wandb's format: method, metric, parameters, early_terminate, command.

The same file means the same whether Optuna searches here or wandb's server does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.sweep.hyperband import Hyperband, parse_early_terminate
from echelon.sweep.located_yaml import LocatedYaml, load_yaml
from echelon.sweep.search_space import (
    INTEGER_HINT,
    SearchParameter,
    is_finite_number,
    parse_parameters,
)

METHODS = ("grid", "random", "bayes")
GOALS = ("minimize", "maximize")
_KNOWN_KEYS = {
    *("method", "metric", "parameters", "run_cap", "early_terminate", "command", "program"),
    *("name", "description", "project", "entity", "apiVersion", "kind", "controller"),
}
_UNSUPPORTED_KEYS = {
    "scheduler": "leave it out: `--engine` says who searches",
    "metrics": "give one metric: a sweep has one goal",
    "job": "leave it out: runs are started by `launch=`, not by wandb's Launch",
    "image_uri": "leave it out: runs are started by `launch=`, not by wandb's Launch",
}
"""Keys of wandb's that mean something which Echelon does otherwise."""
_MAX_GRID_VALUES = 10_000


@dataclass(frozen=True)
class SweepMetric:
    """What a sweep optimises. Serialised by these names, which are wandb's."""

    name: str
    goal: str = "minimize"
    target: float | None = None
    """The sweep ends as soon as a trial reaches it."""

    @property
    def minimize_sign(self) -> float:
        """1 or -1: values times this are better when they are less."""
        return 1.0 if self.goal == "minimize" else -1.0


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file describes it, checked."""

    path: Path
    method: str
    metric: SweepMetric | None
    parameters: dict[str, SearchParameter]
    run_cap: int | None = None
    early_terminate: Hyperband | None = None
    program: str | None = None
    command: tuple[str, ...] | None = None
    name: str | None = None
    description: str | None = None
    project: str | None = None
    entity: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """The file as plain data, which wandb's server is sent. `1e-4`, text to YAML, is a number."""
    notes: tuple[str, ...] = ()
    """Values that were read as something else than YAML says, for the user to see."""

    @property
    def searched_parameters(self) -> list[SearchParameter]:
        """The parameters that differ between trials."""
        return [p for p in self.parameters.values() if p.is_searched]

    @property
    def constant_values(self) -> dict[str, Any]:
        """The parameters that all trials share."""
        return {p.name: p.values[0] for p in self.parameters.values() if not p.is_searched}


def read_sweep_file(path: Path) -> SweepFile:
    """Read a sweep, or raise one EchelonError with every fault and its line."""
    return parse_sweep(load_yaml(path))


def parse_sweep(file: LocatedYaml) -> SweepFile:
    """Check what was read, or raise one EchelonError with every fault and its line."""
    sweep_file, faults = inspect_sweep(file)
    if faults:
        raise EchelonError(*faults)
    return sweep_file


def inspect_sweep(file: LocatedYaml) -> tuple[SweepFile, list[Fault]]:
    """Return what can be read of a sweep, and every fault with its line.

    With the readable part the caller can look for faults of other kinds, so that a person sees all
    of them at once. What is faulty is None there, or missing among the parameters.
    """
    data, faults = file.data, list[Fault]()
    if not isinstance(data, dict):
        what = f"{file.path} is empty" if data is None else f"{file.locate()}: a sweep is a mapping"
        raise EchelonError(Fault(what, "write method and parameters, as in examples/sweeper.yml"))
    faults.extend(_check_keys(file, data))
    parameters = parse_parameters(file, data.get("parameters"), faults)
    metric = _parse_metric(file, data.get("metric"), faults)
    early = parse_early_terminate(file, data.get("early_terminate"), faults)
    faults.extend(_check_method(file, data, parameters))
    if metric is None and (data.get("method") == "bayes" or early):
        what = "early_terminate" if early else "method: bayes"
        faults.append(
            Fault(
                f"{file.locate('method')}: {what} needs a metric",
                "add  metric: {name: eval/loss, goal: minimize}",
            )
        )
    texts = {
        key: _parse_string_key(file, data, key, faults)
        for key in ("program", "name", "description", "project", "entity")
    }
    cap, command = _parse_run_cap(file, data, faults), _parse_command(file, data, faults)
    sweep_file = SweepFile(
        path=file.path,
        method=str(data.get("method")),
        metric=metric,
        parameters=parameters,
        run_cap=cap,
        early_terminate=early,
        command=command,
        data=data,
        notes=tuple(file.notes),
        **texts,
    )
    return sweep_file, faults


def _check_keys(file: LocatedYaml, data: Mapping[str, Any]) -> Iterator[Fault]:
    for key in data.keys() - _KNOWN_KEYS:
        if key in _UNSUPPORTED_KEYS:
            yield Fault(f"{file.locate(key)}: {key!r} is not supported", _UNSUPPORTED_KEYS[key])
        else:
            yield Fault(
                f"{file.locate(key)}: a sweep has no {key!r}", suggest_nearest(key, _KNOWN_KEYS)
            )


def _check_method(
    file: LocatedYaml, data: Mapping[str, Any], parameters: Mapping[str, SearchParameter]
) -> Iterator[Fault]:
    method = data.get("method")
    if method not in METHODS:
        what = "there is no method" if method is None else f"the method {method!r} is unknown"
        yield Fault(f"{file.locate('method')}: {what}", suggest_nearest(str(method), METHODS))
    if method != "grid":
        return
    for parameter in parameters.values():
        count = parameter.value_count
        if count is None:
            yield Fault(
                f"{parameter.location}: {parameter.name} is {parameter.distribution}, which has "
                "no grid",
                "list its values, use int_uniform or q_uniform, or method: random",
            )
        elif count > _MAX_GRID_VALUES:
            yield Fault(
                f"{parameter.location}: {parameter.name} has {count:,} values, too many for a grid",
                "give fewer, or use method: random",
            )


def _parse_metric(file: LocatedYaml, entry: Any, faults: list[Fault]) -> SweepMetric | None:
    if entry is None:
        return None
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        faults.append(
            Fault(f"{file.locate('metric')}: the metric has no name", "add  name: eval/loss")
        )
        return None
    for key in entry.keys() - {"name", "goal", "target", "impute", "impute_while_running"}:
        faults.append(
            Fault(
                f"{file.locate('metric', key)}: a metric has no {key!r}",
                suggest_nearest(key, ("name", "goal", "target")),
            )
        )
    goal, target = entry.get("goal", "minimize"), entry.get("target")
    if goal not in GOALS:
        faults.append(
            Fault(
                f"{file.locate('metric', 'goal')}: the goal {goal!r}",
                suggest_nearest(str(goal), GOALS),
            )
        )
    if target is not None and not is_finite_number(target):
        faults.append(
            Fault(f"{file.locate('metric', 'target')}: the target {target!r}", "give a number")
        )
    return SweepMetric(name, goal, target)


def _parse_run_cap(file: LocatedYaml, data: Mapping[str, Any], faults: list[Fault]) -> int | None:
    cap = data.get("run_cap")
    if cap is not None and (type(cap) is not int or cap < 1):
        faults.append(Fault(f"{file.locate('run_cap')}: run_cap is {cap!r}", INTEGER_HINT))
        return None
    return cap


def _parse_command(
    file: LocatedYaml, data: Mapping[str, Any], faults: list[Fault]
) -> tuple[str, ...] | None:
    command = data.get("command")
    if command is None:
        return None
    if not isinstance(command, list) or not command:
        faults.append(
            Fault(f"{file.locate('command')}: the command is not a list", "write a - per word")
        )
        return None
    return tuple(str(word) for word in command)


def _parse_string_key(
    file: LocatedYaml, data: Mapping[str, Any], key: str, faults: list[Fault]
) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        faults.append(
            Fault(f"{file.locate(key)}: {key} is {value!r}, not text", "put it in quotes")
        )
        return None
    return value
