"""The report of a sweep: its trials, the best of them, and which parameters matter."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.sweep.sweep_file import SweepMetric
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import ENDED_STATES, TrialStore, TrialSummary

if TYPE_CHECKING:
    import optuna

MIN_TRIALS_FOR_IMPORTANCE = 8
"""With fewer results the importance of parameters would be noise."""


class SweepReport(NamedTuple):
    """The state of a sweep at one moment, whether it is searched here or by wandb's server."""

    sweep: SweepFolder
    metric: SweepMetric
    run_cap: int
    trials: list[TrialSummary]
    importance: dict[str, float]
    """Of the parameters, as parts of 1, the largest first; empty if it cannot be computed."""
    stop_reason: str
    """Why it ended before it had run_cap trials, else ""."""

    def rank_trials(self) -> list[TrialSummary]:
        """Return the trials that have a value, the best first, and finished ones before others."""

        def make_key(trial: TrialSummary) -> tuple[bool, float, int]:
            value = self.metric.minimize_sign * (trial.metric_value or 0.0)
            value = math.inf if math.isnan(value) else value  # which no order has a place for
            return trial.state != "finished", value, trial.number

        known = [t for t in self.trials if t.metric_value is not None and t.state != "failed"]
        return sorted(known, key=make_key)

    @property
    def best(self) -> TrialSummary | None:
        """The best finished trial."""
        ranked = self.rank_trials()
        return ranked[0] if ranked and ranked[0].state == "finished" else None

    def count_states(self) -> dict[str, int]:
        """Return how many trials are in each state."""
        states = [trial.state for trial in self.trials]
        return {s: states.count(s) for s in (*ENDED_STATES, "running", "waiting")}

    @property
    def open_trials(self) -> list[TrialSummary]:
        """The trials without a final trial."""
        return [trial for trial in self.trials if trial.state not in ENDED_STATES]

    @property
    def ended_count(self) -> int:
        """The number of final results."""
        return len(self.trials) - len(self.open_trials)

    def to_dict(self) -> dict[str, Any]:
        """Return what `echelon sweep show --json` prints."""
        return {
            "version": 1,
            "sweep": self.sweep.name,
            "folder": str(self.sweep.folder),
            "metric": self.metric.name,
            "goal": self.metric.goal,
            "run_cap": self.run_cap,
            "results": self.ended_count,
            "ending": self.stop_reason or None,
            "best": self._trial_to_dict(self.best) if self.best else None,
            "importance": self.importance,
            "trials": [self._trial_to_dict(trial) for trial in self.trials],
        }

    def _trial_to_dict(self, trial: TrialSummary) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "run": trial.run,
            "state": trial.state,
            "value": _to_finite_or_none(trial.metric_value),
            "parameters": trial.parameters,
            "evaluations": len(trial.history),
            "cause": trial.cause or None,
        }


def _to_finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def build_report(store: TrialStore, with_importance: bool = True) -> SweepReport:
    """Return the report of a sweep that is searched here."""
    sweep, trials = store.sweep, store.summarize_trials()
    return SweepReport(
        sweep,
        sweep.read_metric(),
        sweep.read_settings().run_cap,
        trials,
        compute_importance(_copy_results(store.study, trials)) if with_importance else {},
        store.find_stop_reason(),
    )


def has_result(trial: TrialSummary) -> bool:
    """Return whether the trial ended with a finite value, be it stopped early."""
    value = trial.metric_value
    return trial.state in ("finished", "pruned") and value is not None and math.isfinite(value)


def _copy_results(study: optuna.Study, trials: Sequence[TrialSummary]) -> optuna.Study:
    """Return a study in memory in which all results are final, those of pruned trials as well.

    Optuna computes importance from final results only. But a trial is pruned because others were
    better after as many evaluations, and most of them have improved since. So its value so far is
    hardly ever among the best, and shows which parameters are bad.
    """
    import optuna

    values = {trial.number: trial.metric_value for trial in trials if has_result(trial)}
    copy = optuna.create_study(direction=study.direction)
    copy.add_trials(
        [
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=values[trial.number]
            )
            for trial in study.get_trials(deepcopy=False)
            if trial.number in values
        ]
    )
    return copy


def compute_importance(study: optuna.Study) -> dict[str, float]:
    """Return the importance of the parameters by PED-ANOVA, as parts of 1.

    It compares the better trials with all, and unlike Optuna's default needs no other library.
    """
    import optuna

    if len(study.get_trials(deepcopy=False)) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        parts = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {str(name): float(part) for name, part in parts.items() if math.isfinite(part)}
    return {}
