"""A sweep in numbers: its trials, the best of them, which parameters matter."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.sweep.sweep_file import SweepMetric
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import ENDED_STATES, TrialStore, TrialSummary

if TYPE_CHECKING:
    import optuna

_MIN_TRIALS_FOR_IMPORTANCE = 8
"""Results below which nothing is said about importance: it would be noise."""


class SweepReport(NamedTuple):
    sweep: SweepFolder
    metric: SweepMetric
    run_cap: int
    trials: list[TrialSummary]
    importance: dict[str, float]
    """Parts of 1, the largest first; empty when it cannot be told."""
    stop_reason: str

    def rank_trials(self) -> list[TrialSummary]:
        """With a value, the best first; what was pruned does not win over what was finished."""
        known = [r for r in self.trials if r.metric_value is not None and r.state != "failed"]
        order = {"finished": 0}
        return sorted(
            known,
            key=lambda r: (
                order.get(r.state, 1),
                self.metric.sign * (r.metric_value or 0.0),
                r.number,
            ),
        )

    @property
    def best(self) -> TrialSummary | None:
        ranked = self.rank_trials()
        return ranked[0] if ranked and ranked[0].state == "finished" else None

    def count_states(self) -> dict[str, int]:
        states = [result.state for result in self.trials]
        return {s: states.count(s) for s in (*ENDED_STATES, "running", "waiting")}

    @property
    def open_trials(self) -> list[TrialSummary]:
        return [result for result in self.trials if result.state not in ENDED_STATES]

    @property
    def ended_count(self) -> int:
        return len(self.trials) - len(self.open_trials)

    def to_dict(self) -> dict[str, Any]:
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
            "trials": [self._trial_to_dict(result) for result in self.trials],
        }

    def _trial_to_dict(self, result: TrialSummary) -> dict[str, Any]:
        return {
            "trial": result.number,
            "run": result.run,
            "state": result.state,
            "value": _finite_or_none(result.metric_value),
            "parameters": result.parameters,
            "evaluations": len(result.history),
            "cause": result.cause or None,
        }


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def build_report(store: TrialStore, importance: bool = True) -> SweepReport:
    sweep = store.sweep
    results = store.summarize_trials()
    weights_found = compute_importance(store.study) if importance else {}
    return SweepReport(
        sweep,
        sweep.read_metric(),
        sweep.read_settings().cap,
        results,
        weights_found,
        store.find_stop_reason(),
    )


def compute_importance(study: optuna.Study) -> dict[str, float]:
    """Of the parameters, by PED-ANOVA, which needs no other library. It compares the better trials
    with all."""
    import optuna

    finished = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    if len(finished) < _MIN_TRIALS_FOR_IMPORTANCE:
        return {}
    with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {str(name): float(part) for name, part in found.items() if math.isfinite(part)}
    return {}
