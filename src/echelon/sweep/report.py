"""A sweep in numbers: its trials, the best of them, which parameters matter."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.sweep.book import ENDED, Book, Result
from echelon.sweep.file import Metric
from echelon.sweep.folder import Sweep

if TYPE_CHECKING:
    import optuna

_ENOUGH = 8
"""Results below which nothing is said about importance: it would be noise."""


class Report(NamedTuple):
    sweep: Sweep
    metric: Metric
    cap: int
    results: list[Result]
    importance: dict[str, float]
    """Parts of 1, the largest first; empty when it cannot be told."""
    ending: str

    def ranked(self) -> list[Result]:
        """With a value, the best first; what was pruned does not win over what was finished."""
        known = [r for r in self.results if r.value is not None and r.state != "failed"]
        order = {"finished": 0}
        return sorted(
            known,
            key=lambda r: (order.get(r.state, 1), self.metric.sign * (r.value or 0.0), r.number),
        )

    @property
    def best(self) -> Result | None:
        ranked = self.ranked()
        return ranked[0] if ranked and ranked[0].state == "finished" else None

    def counts(self) -> dict[str, int]:
        states = [result.state for result in self.results]
        return {s: states.count(s) for s in (*ENDED, "running", "waiting")}

    @property
    def open(self) -> list[Result]:
        return [result for result in self.results if result.state not in ENDED]

    @property
    def done(self) -> int:
        return len(self.results) - len(self.open)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "sweep": self.sweep.name,
            "folder": str(self.sweep.folder),
            "metric": self.metric.name,
            "goal": self.metric.goal,
            "run_cap": self.cap,
            "results": self.done,
            "ending": self.ending or None,
            "best": self._told(self.best) if self.best else None,
            "importance": self.importance,
            "trials": [self._told(result) for result in self.results],
        }

    def _told(self, result: Result) -> dict[str, Any]:
        return {
            "trial": result.number,
            "run": result.run,
            "state": result.state,
            "value": _finite(result.value),
            "parameters": result.values,
            "evaluations": len(result.history),
            "cause": result.cause or None,
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def report(book: Book, importance: bool = True) -> Report:
    sweep = book.sweep
    results = book.results()
    told = weights(book.study) if importance else {}
    return Report(sweep, sweep.metric(), sweep.settings().cap, results, told, book.ending())


def weights(study: optuna.Study) -> dict[str, float]:
    """Of the parameters, by PED-ANOVA, which needs no other library. It compares the better trials
    with all."""
    import optuna

    finished = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    if len(finished) < _ENOUGH:
        return {}
    with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {str(name): float(part) for name, part in found.items() if math.isfinite(part)}
    return {}
