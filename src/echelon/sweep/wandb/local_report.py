"""The report of a sweep on wandb's server, from the records of our own agents."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.runs.run_folder import Run
from echelon.sweep.located_yaml import LocatedYaml
from echelon.sweep.metric_history import MetricHistory, to_metrics_file_key
from echelon.sweep.optuna_study import require_optuna
from echelon.sweep.report import SweepReport, compute_importance, has_result
from echelon.sweep.sampling import encode_choice
from echelon.sweep.search_space import SearchParameter
from echelon.sweep.sweep_file import SweepFile, SweepMetric, parse_sweep
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import TrialSummary
from echelon.sweep.wandb import server_sweep, trial_records
from echelon.sweep.wandb.trial_records import WandbTrialRecord

if TYPE_CHECKING:
    import optuna


def build_report_from_records(sweep: SweepFolder) -> SweepReport:
    """Return the report without asking the server, so without trials of other agents."""
    known = server_sweep.read_server_file(sweep.folder)
    metric = SweepMetric(**known["metric"])
    key = to_metrics_file_key(metric.name, known["program"])
    records = trial_records.read_trial_records(sweep.folder)
    trials = [_summarize_record(i, record, sweep.folder, key) for i, record in enumerate(records)]
    file = parse_sweep(LocatedYaml(sweep.folder, known["file"], {}))
    importance = compute_importance(_build_study(file, metric, trials)) if _has_optuna() else {}
    return SweepReport(sweep, metric, known["run_cap"], trials, importance, "")


def _summarize_record(
    number: int, record: WandbTrialRecord, folder: Path, key: str
) -> TrialSummary:
    trial = record.to_checked_trial()
    history = MetricHistory(
        Run(folder.with_name(trial.run_name)).metrics_file, key
    ).read_all_values()
    state = {"stopped": "pruned", "preempted": "waiting"}.get(record.state, record.state)
    value = history[-1] if history else record.value  # wandb takes the last one
    parameters = dict(trial.values)
    return TrialSummary(
        number, record.id, trial.run_name, state, value, parameters, history, record.cause
    )


def _has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


def _build_study(
    file: SweepFile, metric: SweepMetric, trials: Sequence[TrialSummary]
) -> optuna.Study:
    """Return a study in memory with the results of these trials, from which Optuna computes the
    importance."""
    import optuna

    require_optuna()
    study = optuna.create_study(direction="maximize" if metric.goal == "maximize" else "minimize")
    ended = [trial for trial in trials if has_result(trial)]
    distributions = {
        p.name: distribution
        for p in file.searched_parameters
        if all(p.name in r.parameters for r in ended)
        and (distribution := _build_distribution(p, [r.parameters[p.name] for r in ended]))
    }
    for result in ended:
        values = {name: encode_choice(result.parameters[name]) for name in distributions}
        study.add_trial(
            optuna.trial.create_trial(
                params=values, distributions=distributions, value=result.metric_value
            )
        )
    return study


def _build_distribution(
    parameter: SearchParameter, values: Sequence[Any]
) -> optuna.distributions.BaseDistribution | None:
    import optuna

    if parameter.values:
        return optuna.distributions.CategoricalDistribution(
            sorted({*map(encode_choice, values)}, key=str)
        )
    low, high = min(values, default=0), max(values, default=0)
    if not low < high:
        return None
    log = "log" in parameter.distribution and low > 0
    return optuna.distributions.FloatDistribution(low, high, log=log)
