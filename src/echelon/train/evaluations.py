"""The evaluations of a run: their results, and what follows from them: the best snapshot, an early
end, and the learning rates of schedules that wait for a result."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from echelon.config.schema import TrainerConfig
from echelon.tracking.tracker import is_better
from echelon.train.best_metric import make_unknown_best_error
from echelon.train.early_stop import EarlyStop
from echelon.train.evaluate import Evaluator

if TYPE_CHECKING:
    from echelon.train.step_boundary import StepBoundary


class Evaluations:
    """Evaluates a run between two steps, and knows the last results. Without an `evaluator` nothing
    is evaluated."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        trainer: TrainerConfig,
        early_stop: EarlyStop | None,
        schedules: Sequence[ReduceLROnPlateau],
    ) -> None:
        self.evaluator = evaluator
        self.is_left = False
        """Whether this step is saved, but the evaluation that was due after it is not made yet."""
        self.is_running = False
        """Stays True if an evaluation fails, so that a report of the failure can say so."""
        self._trainer = trainer
        self._early_stop = early_stop
        self._schedules = schedules
        self._results: dict[str, float] = {}
        self._evaluated_step: int | None = None

    @property
    def has_passed(self) -> bool:
        """Whether an evaluation of this run has passed, in this process or before."""
        return self._evaluated_step is not None

    def close_source(self) -> None:
        """End the processes that load data."""
        if self.evaluator is not None and self.evaluator.source is not None:
            self.evaluator.source.close()

    def restore(self, info: Mapping[str, Any], is_own_snapshot: bool) -> None:
        """Continue from what a snapshot says of the last evaluation, when the schedules are
        restored. Only a run's own snapshot can have left one to be made."""
        self._results, self._evaluated_step = info.get("results", {}), info.get("evaluated_step")
        is_left = is_own_snapshot and info.get("evaluation_left", False)
        self.is_left = is_left and self.evaluator is not None
        if self._early_stop is not None:
            self._early_stop.load_state_dict(info.get("early_stop") or {})
        if info.get("scheduled_evaluation", self._evaluated_step) != self._evaluated_step:
            self._step_schedules()

    def describe(self, best_value: float | None) -> dict[str, Any]:
        """Return what a snapshot that is saved now says of the last evaluation."""
        # A step is saved before it is evaluated: then its results are added to the snapshot later,
        # but the schedules in it do not know them.
        return self._describe_results(best_value) | {"scheduled_evaluation": self._evaluated_step}

    def _describe_results(self, best_value: float | None) -> dict[str, Any]:
        return {
            "best": best_value,
            "results": self._results,
            "evaluated_step": self._evaluated_step,
            "evaluation_left": self.is_left,
            "early_stop": None if self._early_stop is None else self._early_stop.state_dict(),
        }

    def evaluate(self, t: StepBoundary) -> bool:
        """Evaluate, unless this step has been evaluated already; return whether it was done now.
        All ranks take part.

        The results are added to the snapshot of this step. Where it was not saved, it is saved now
        if it is the best.
        """
        if self.evaluator is None or self._evaluated_step == t.step:
            return False
        t.heartbeat.suspend()
        if self.is_left:
            t.wait_for_save()
        self.is_running = True
        results = self.evaluator()
        self.is_running = self.is_left = False
        is_best = self._take_results(results, t)
        if t.trackers:
            numbers = {f"eval_{k}": v for k, v in results.items()}
            t.log_to_trackers({"step": t.step, "epoch": t.count_epochs(), **numbers})
            shown = "  ".join(f"{k} {v:.5g}" for k, v in results.items())
            print(f"evaluated after step {t.step}: {shown}", file=sys.stderr)
        self.stop_early_if_due(t)
        t.heartbeat.beat()
        if t.saved_step != t.step and is_best:
            t.save(is_best=True)
        elif t.saved_step == t.step and t.writer is not None:
            t.writer.record_evaluation(t.step, self._describe_results(t.best_value), is_best)
        return True

    def _take_results(self, results: dict[str, float], t: StepBoundary) -> bool:
        """Keep the results; return whether the number that `trainer.best` names is the best so
        far."""
        self.require_metrics(results)
        self._results, self._evaluated_step = results, t.step
        value = results[self._trainer.best]
        is_best = is_better(value, t.best_value, self._trainer.best_is)
        if is_best:
            t.best_value = value
        if self._early_stop is not None:
            self._early_stop.record_results(results)
        self._step_schedules()
        return is_best

    def _step_schedules(self) -> None:
        """Give the last value of the number that `trainer.best` names to the schedules that wait
        for it. It is the same on all ranks, and so are the rates."""
        value = self._results.get(self._trainer.best)
        if value is not None:  # as it is where a resumed run has another best
            for schedule in self._schedules:
                schedule.step(value)

    def require_metrics(self, results: Mapping[str, float]) -> None:
        """Raise where the results lack a number that a setting names: a metric with several
        results has names that only a result shows."""
        if self._trainer.best not in results:
            raise make_unknown_best_error(self._trainer.best, results)
        if self._early_stop is not None:
            self._early_stop.require_metric(results)

    def stop_early_if_due(self, t: StepBoundary) -> None:
        """Make this step the last one where `trainer.early_stop` asks for it."""
        if self._early_stop is None or not self._early_stop.is_reached:
            return
        if t.group.world.rank == 0 and t.step < t.total_steps:
            reason = self._early_stop.describe()
            print(
                f"finished early after step {t.step} of {t.total_steps}: {reason}", file=sys.stderr
            )
        t.total_steps = t.step
