"""A sweep on wandb's server as it looks from here: what our agents have run of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.runs import Run
from echelon.sweep.book import Result
from echelon.sweep.file import Metric, SweepFile, understood
from echelon.sweep.folder import Sweep
from echelon.sweep.marked import Marked
from echelon.sweep.metrics import History, key_of
from echelon.sweep.report import Report, weights
from echelon.sweep.search import choice
from echelon.sweep.space import Parameter
from echelon.sweep.study import require
from echelon.sweep.wandb import creation, record
from echelon.sweep.wandb.record import Told

if TYPE_CHECKING:
    import optuna


def looked_at(sweep: Sweep, importance: bool = True) -> Report:
    known = creation.read(sweep.folder)
    metric = Metric(**known["metric"])
    key = key_of(metric.name, known["program"])
    told = enumerate(record.read(sweep.folder))
    results = [_result(number, one, sweep.folder, key) for number, one in told]
    file = understood(Marked(sweep.folder, known["file"], {}))
    parts = weights(_study(file, metric, results)) if importance and _has_optuna() else {}
    return Report(sweep, metric, known["cap"], results, parts, "")


def _result(number: int, told: Told, folder: Path, key: str) -> Result:
    trial = told.trial()
    history = History(Run(folder.with_name(trial.run_name)).metrics_file, key).read()
    state = {"stopped": "pruned", "preempted": "waiting"}.get(told.state, told.state)
    value = history[-1] if history else told.value  # the last one is what wandb goes by
    given = dict(trial.values)
    return Result(number, told.id, trial.run_name, state, value, given, history, told.cause)


def _has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


def _study(file: SweepFile, metric: Metric, results: Sequence[Result]) -> optuna.Study:
    """The same trials as if Optuna had searched, which then can say what mattered."""
    import optuna

    require()
    study = optuna.create_study(direction="maximize" if metric.goal == "maximize" else "minimize")
    finished = [r for r in results if r.state == "finished" and r.value is not None]
    ranges = {
        p.name: made
        for p in file.searched
        if all(p.name in r.values for r in finished)
        and (made := _range(p, [r.values[p.name] for r in finished]))
    }
    for result in finished:
        values = {name: choice(result.values[name]) for name in ranges}
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=ranges, value=result.value)
        )
    return study


def _range(
    parameter: Parameter, values: Sequence[Any]
) -> optuna.distributions.BaseDistribution | None:
    import optuna

    if parameter.values:
        return optuna.distributions.CategoricalDistribution(sorted({*map(choice, values)}, key=str))
    low, high = min(values, default=0), max(values, default=0)
    if not low < high:
        return None
    log = "log" in parameter.distribution and low > 0
    return optuna.distributions.FloatDistribution(low, high, log=log)
