"""`trainer.early_stop`: ends a training whose evaluated number has stopped getting better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.tracking.tracker import is_better
from echelon.train.best_metric import make_unknown_best_error


class EarlyStop:
    """Counts the evaluations since a number was last better than ever before."""

    def __init__(self, metric: str, best_is: str, patience: int) -> None:
        self._metric = metric
        self._best_is = best_is
        self._patience = patience
        self._best: float | None = None
        self._worse_count = 0

    def require_metric(self, results: Mapping[str, float]) -> None:
        """Raises a fault where an evaluation does not give the number."""
        if self._metric not in results:
            raise make_unknown_best_error(self._metric, results, "trainer.early_stop.metric")

    def record_results(self, results: Mapping[str, float]) -> None:
        """Takes the results of an evaluation."""
        self.require_metric(results)
        value = results[self._metric]
        if is_better(value, self._best, self._best_is):
            self._best, self._worse_count = value, 0
        else:
            self._worse_count += 1

    @property
    def is_reached(self) -> bool:
        """Whether so many evaluations were not better that the training ends."""
        return self._worse_count >= self._patience

    def describe(self) -> str:
        """Return why the training ends, as the end of a sentence."""
        best = "never finite" if self._best is None else f"not better than {self._best:.5g}"
        return f"{self._metric} was {best} in the last {self._worse_count} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot keeps, as JSON."""
        return {"metric": self._metric, "best": self._best, "worse_count": self._worse_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues to count. What was counted for another number does not count for this one."""
        if state.get("metric") == self._metric:
            self._best, self._worse_count = state["best"], state["worse_count"]
