"""A sweep as its file describes it, in wandb's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.sweep import located_yaml
from echelon.sweep.located_yaml import LocatedYaml
from echelon.sweep.search_space import SearchParameter, is_finite_number, parse_parameters

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


_INTEGER_HINT = "give a whole number from 1 on"
_MAX_GRID_VALUES = 10_000


@dataclass(frozen=True)
class SweepMetric:
    name: str
    goal: str = "minimize"
    target: float | None = None
    """The sweep is over as soon as a trial is there."""

    @property
    def sign(self) -> float:
        """Times this, less is better."""
        return 1.0 if self.goal == "minimize" else -1.0


@dataclass(frozen=True)
class Hyperband:
    """wandb's `early_terminate`: bands, counted in evaluations, at which only the best 1/eta of
    all trials that came so far go on."""

    bands: tuple[int, ...]
    eta: float = 3.0
    strict: bool = False
    """Judge from the first trial on; else from the eta-th that reached a band."""


@dataclass(frozen=True)
class SweepFile:
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
    """As it was read, with numbers where YAML saw text: what wandb's server is sent."""
    notes: tuple[str, ...] = ()
    """What was taken for something else than it says."""

    @property
    def searched_parameters(self) -> list[SearchParameter]:
        return [p for p in self.parameters.values() if p.is_searched]

    @property
    def constant_values(self) -> dict[str, Any]:
        return {p.name: p.values[0] for p in self.parameters.values() if not p.is_searched}


def read_sweep_file(path: Path) -> SweepFile:
    """The sweep, or one EchelonError with every fault and its line."""
    return parse_sweep(located_yaml.load_yaml(path))


def parse_sweep(file: LocatedYaml) -> SweepFile:
    data, faults = file.data, list[Fault]()
    if not isinstance(data, dict):
        what = f"{file.path} is empty" if data is None else f"{file.locate()}: a sweep is a mapping"
        raise EchelonError(Fault(what, "write method and parameters, as in examples/sweeper.yml"))
    faults.extend(_check_keys(file, data))
    found = parse_parameters(file, data.get("parameters"), faults)
    metric = _parse_metric(file, data.get("metric"), faults)
    early = _parse_early_terminate(file, data.get("early_terminate"), faults)
    faults.extend(_check_method(file, data, found))
    if metric is None and (data.get("method") == "bayes" or early):
        what = "early_terminate" if early else "method: bayes"
        faults.append(
            Fault(
                f"{file.locate('method')}: {what} needs a metric to go by",
                "add  metric: {name: eval/loss, goal: minimize}",
            )
        )
    texts = {
        key: _parse_text(file, data, key, faults)
        for key in ("program", "name", "description", "project", "entity")
    }
    cap, command = _parse_run_cap(file, data, faults), _parse_command(file, data, faults)
    if faults:
        raise EchelonError(*faults)
    return SweepFile(
        path=file.path,
        method=data["method"],
        metric=metric,
        parameters=found,
        run_cap=cap,
        early_terminate=early,
        command=command,
        data=data,
        notes=tuple(file.notes),
        **texts,
    )


def _check_keys(file: LocatedYaml, data: Mapping[str, Any]) -> Iterator[Fault]:
    for key in data.keys() - _KNOWN_KEYS:
        if key in _UNSUPPORTED_KEYS:
            yield Fault(f"{file.locate(key)}: {key!r} is not supported", _UNSUPPORTED_KEYS[key])
        else:
            yield Fault(
                f"{file.locate(key)}: a sweep has no {key!r}", suggest_nearest(key, _KNOWN_KEYS)
            )


def _check_method(
    file: LocatedYaml, data: Mapping[str, Any], found: Mapping[str, SearchParameter]
) -> Iterator[Fault]:
    method = data.get("method")
    if method not in METHODS:
        what = "there is no method" if method is None else f"the method {method!r} is unknown"
        yield Fault(f"{file.locate('method')}: {what}", suggest_nearest(str(method), METHODS))
    if method != "grid":
        return
    for parameter in found.values():
        size = parameter.value_count
        if size is None:
            yield Fault(
                f"{parameter.location}: {parameter.name} is {parameter.distribution}, which has no grid",
                "list its values, use int_uniform or q_uniform, or method: random",
            )
        elif size > _MAX_GRID_VALUES:
            yield Fault(
                f"{parameter.location}: {parameter.name} has {size:,} values, too many for a grid",
                "give fewer, or use method: random",
            )


def _parse_metric(file: LocatedYaml, given: Any, faults: list[Fault]) -> SweepMetric | None:
    if given is None:
        return None
    at = file.locate("metric")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        faults.append(Fault(f"{at}: the metric has no name", "add  name: eval/loss"))
        return None
    for key in given.keys() - {"name", "goal", "target", "impute", "impute_while_running"}:
        faults.append(
            Fault(
                f"{file.locate('metric', key)}: a metric has no {key!r}",
                suggest_nearest(key, ("name", "goal", "target")),
            )
        )
    goal, target = given.get("goal", "minimize"), given.get("target")
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
    return SweepMetric(given["name"], goal, target)


def _parse_early_terminate(file: LocatedYaml, given: Any, faults: list[Fault]) -> Hyperband | None:
    if given is None:
        return None
    before, at = len(faults), file.locate("early_terminate")
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        kind = given.get("type") if isinstance(given, dict) else given
        faults.append(Fault(f"{at}: early_terminate of type {kind!r}", "write  type: hyperband"))
        return None
    known = {"type": str, "min_iter": int, "max_iter": int, "s": int, "eta": float, "strict": bool}
    for key, value in given.items():
        where = file.locate("early_terminate", key)
        if key not in known:
            faults.append(Fault(f"{where}: hyperband has no {key!r}", suggest_nearest(key, known)))
        elif known[key] is int and (type(value) is not int or value < 1):
            faults.append(Fault(f"{where}: {key} is {value!r}", _INTEGER_HINT))
        elif key == "eta" and (not is_finite_number(value) or value <= 1):
            faults.append(Fault(f"{where}: eta is {value!r}", "give a number above 1"))
        elif key == "strict" and not isinstance(value, bool):
            faults.append(Fault(f"{where}: strict is {value!r}", "write true or false"))
    if len(faults) > before:
        return None
    bands = _compute_bands(given)
    if not bands:
        faults.append(
            Fault(
                f"{at}: these settings of hyperband leave no band to judge at",
                "give min_iter, or max_iter with s, so that max_iter / eta is 1 or more",
            )
        )
        return None
    return Hyperband(bands, float(given.get("eta", 3)), bool(given.get("strict", False)))


def _compute_bands(given: Mapping[str, Any]) -> tuple[int, ...]:
    """min_iter: it, times eta, and so on, while a training can be as long. max_iter and s: max_iter
    over eta, and so on, s times."""
    eta = float(given.get("eta", 3))
    if "max_iter" in given:
        below = (int(given["max_iter"] / eta**i) for i in range(1, int(given.get("s", 0)) + 1))
        return tuple(sorted({band for band in below if band >= 1}))
    if "min_iter" not in given:
        return ()
    bands, band = set[int](), float(given["min_iter"])
    while band < 1e9:
        bands.add(int(band))
        band *= eta
    return tuple(sorted(bands))


def _parse_run_cap(file: LocatedYaml, data: Mapping[str, Any], faults: list[Fault]) -> int | None:
    cap = data.get("run_cap")
    if cap is not None and (type(cap) is not int or cap < 1):
        faults.append(Fault(f"{file.locate('run_cap')}: run_cap is {cap!r}", _INTEGER_HINT))
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
            Fault(f"{file.locate('command')}: the command is no list", "write a - per word")
        )
        return None
    return tuple(str(word) for word in command)


def _parse_text(
    file: LocatedYaml, data: Mapping[str, Any], key: str, faults: list[Fault]
) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        faults.append(
            Fault(f"{file.locate(key)}: {key} is {value!r}, not a text", "put it in quotes")
        )
        return None
    return value
