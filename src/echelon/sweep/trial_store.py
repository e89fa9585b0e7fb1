"""The trials of a sweep and what came of them, shared by all its workers.

Every change is made under one lock, in a folder that all workers share anyway for the runs. So a
trial has one owner, and there are exactly as many results as were asked for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.sweep import trial_lease as leases
from echelon.sweep.hyperband import find_band, should_stop
from echelon.sweep.lock import SweepLock
from echelon.sweep.optuna_study import open_study
from echelon.sweep.sampling import create_sampler, pick_combination, suggest_value
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_lease import LeaseWatch, TrialLease

if TYPE_CHECKING:
    import optuna

_MAX_INITIAL_FAILURES = 3
"""So many failures, and nothing else, from the start: the sweep is not worth going on with."""
_MAX_TAKES = 10
"""A trial that kills its workers as often before it saves is not given to another one."""
_FATAL_ATTRIBUTE = "fatal"
_CAUSE_ATTRIBUTE = "cause"
_PARAMETERS_ATTRIBUTE = "values"


ENDED_STATES = ("finished", "pruned", "failed")


class LeaseLostError(Exception):
    """Somebody else has the trial by now."""


@dataclass(frozen=True)
class LeasedTrial:
    """A trial in the hands of a worker."""

    number: int
    parameters: dict[str, Any]
    lease: TrialLease


class TrialSummary(NamedTuple):
    """A trial as it stands."""

    number: int
    """In the order in which they were begun."""
    name: str
    """The number; on wandb's server, its id there."""
    run: str
    """The name of its run."""
    state: str
    """running, waiting (begun, and nobody has it), or one of ENDED."""
    metric_value: float | None
    parameters: dict[str, Any]
    history: list[float]
    """Of the metric, evaluation by evaluation."""
    cause: str


class TrialStore:
    def __init__(self, sweep: SweepFolder, worker: str = "") -> None:
        self.sweep, self.worker = sweep, worker
        self._file, self._settings = sweep.read_file(), sweep.read_settings()
        self._metric = sweep.read_metric()
        self._lock = SweepLock(sweep.lock_file)
        self._watch = LeaseWatch(self._settings.lease_s)
        self.study, self._flush = open_study(sweep, self._lock)
        from optuna.trial import TrialState

        self._finished = TrialState.COMPLETE
        self._states = {
            TrialState.COMPLETE: "finished",
            TrialState.PRUNED: "pruned",
            TrialState.FAIL: "failed",
        }

    # --- looking ---

    def summarize_trials(self) -> list[TrialSummary]:
        return [self._summarize(trial) for trial in self._load_trials()]

    def _load_trials(self) -> list[optuna.trial.FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False))

    def _summarize(self, trial: optuna.trial.FrozenTrial) -> TrialSummary:
        history = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        value = trial.value if trial.state == self._finished else self._best_value(history)
        values = trial.user_attrs.get(_PARAMETERS_ATTRIBUTE) or {}
        state = self._states.get(trial.state) or self._open_state(trial.number)
        cause = str(trial.user_attrs.get(_CAUSE_ATTRIBUTE, ""))
        run, number = self.sweep.trial_run(trial.number).name, trial.number
        return TrialSummary(number, str(number), run, state, value, values, history, cause)

    def _open_state(self, number: int) -> str:
        left = leases.is_abandoned(leases.read_lease(self.sweep.lease_file(number)))
        return "waiting" if left else "running"

    def _best_value(self, history: Sequence[float]) -> float | None:
        if not history:
            return None
        return max(history) if self._metric.goal == "maximize" else min(history)

    def find_stop_reason(self) -> str:
        """Why no trial is begun any more, before there are as many as were asked for; "": go on."""
        return self._stop_reason(self._load_trials())

    def _stop_reason(self, trials: Sequence[optuna.trial.FrozenTrial]) -> str:
        for trial in trials:
            if _FATAL_ATTRIBUTE in trial.user_attrs:
                return str(trial.user_attrs[_FATAL_ATTRIBUTE])
        if reached := next(filter(self._has_reached_target, trials), None):
            return f"trial {reached.number} reached the target: {reached.value:g}"
        ended = [self._states[trial.state] for trial in trials if trial.state in self._states]
        if len(ended) >= _MAX_INITIAL_FAILURES and set(ended) == {"failed"}:
            cause = next(
                t.user_attrs.get(_CAUSE_ATTRIBUTE, "") for t in trials if t.state in self._states
            )
            return f"the first {len(ended)} trials failed: {cause}"
        return ""

    def _has_reached_target(self, trial: optuna.trial.FrozenTrial) -> bool:
        target, sign = self._metric.target, self._metric.sign
        if target is None or trial.state != self._finished or trial.value is None:
            return False
        return sign * trial.value <= sign * target

    # --- changing ---

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            yield
            self._flush()

    def take_trial(self) -> LeasedTrial | bool:
        """A trial to work on; else whether there may be one later."""
        with self._transaction():
            trials = self._load_trials()
            open_ones = [trial for trial in trials if trial.state not in self._states]
            for trial in open_ones:
                lease = leases.read_lease(self.sweep.lease_file(trial.number))
                if self._watch.is_free_to_take(lease, self.worker):
                    leased = self._lease_trial(self._reopen_trial(trial), lease)
                    if leased.lease.takes <= _MAX_TAKES:
                        return leased
                    often = f"{_MAX_TAKES} times in a row, from step {leased.lease.step}"
                    self._record_end(trial.number, "failed", f"what ran it was killed {often}")
            if len(trials) >= self._settings.cap or self._stop_reason(trials):
                return bool(open_ones)
            return self._lease_trial(self._create_trial(len(trials)), None)

    def _create_trial(self, number: int) -> optuna.Trial:
        self._set_sampler(number)
        if self._file.method == "grid":
            self.study.enqueue_trial(pick_combination(self._file.searched_parameters, number))
        return self.study.ask()

    def _set_sampler(self, number: int) -> None:
        method, seed = self._file.method, self._settings.seed
        self.study.sampler = create_sampler(method, seed, number, self.study.sampler)

    def _reopen_trial(self, trial: optuna.trial.FrozenTrial) -> optuna.Trial:
        """One whose worker is gone, perhaps before it had any value."""
        if trial.state.name == "WAITING":
            return self.study.ask()
        from optuna.trial import Trial

        self._set_sampler(trial.number)
        return Trial(self.study, trial._trial_id)

    def _lease_trial(self, trial: optuna.Trial, previous_lease: TrialLease | None) -> LeasedTrial:
        grid = self._file.method == "grid"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = {p.name: suggest_value(trial, p, grid) for p in self._file.searched_parameters}
        if _PARAMETERS_ATTRIBUTE not in trial.user_attrs:
            trial.set_user_attr(_PARAMETERS_ATTRIBUTE, values)
        step = self.sweep.trial_run(trial.number).find_newest_step()
        lease = leases.create_lease(self.worker, previous_lease, step)
        leases.write_lease(self.sweep.lease_file(trial.number), lease)
        return LeasedTrial(trial.number, values, lease)

    def renew_lease(self, leased: LeasedTrial) -> LeasedTrial:
        """Say that this worker is there."""
        with self._lock:
            self._require_lease(leased)
            renewed = LeasedTrial(leased.number, leased.parameters, leased.lease.with_next_beat())
            leases.write_lease(self.sweep.lease_file(leased.number), renewed.lease)
            return renewed

    def report_history(self, leased: LeasedTrial, history: Sequence[float]) -> bool:
        """Note what a trial has come to; whether it is to stop here. Not worth a wait for the disk:
        a machine that goes down leaves it in the run's own file."""
        with self._lock:
            self._require_lease(leased)
            trials = self._load_trials()
            mine = next(trial for trial in trials if trial.number == leased.number)
            for step in range(len(mine.intermediate_values) + 1, len(history) + 1):
                self.study._storage.set_trial_intermediate_value(
                    mine._trial_id, step, history[step - 1]
                )
        early, sign = self._file.early_terminate, self._metric.sign
        if early is None or not (reached := find_band(early, len(history))):
            return False
        others = [
            sign * trial.intermediate_values[reached]
            for trial in trials
            if trial.number != leased.number and reached in trial.intermediate_values
        ]
        return should_stop(early, sign * history[reached - 1], others)

    def end_trial(
        self, leased: LeasedTrial, state: str, cause: str = "", fatal: bool = False
    ) -> None:
        """The result, once and for all."""
        with self._transaction():
            self._require_lease(leased)
            self._record_end(leased.number, state, cause, fatal)

    def _record_end(self, number: int, state: str, cause: str, fatal: bool = False) -> None:
        trial = next(trial for trial in self._load_trials() if trial.number == number)
        storage, trial_id = self.study._storage, trial._trial_id
        value = self._summarize(trial).metric_value
        if cause:
            storage.set_trial_user_attr(trial_id, _CAUSE_ATTRIBUTE, cause)
        if fatal:
            storage.set_trial_user_attr(trial_id, _FATAL_ATTRIBUTE, cause)
        [final_state] = [known for known, name in self._states.items() if name == state]
        storage.set_trial_state_values(
            trial_id, final_state, None if state == "failed" or value is None else [value]
        )
        self.sweep.lease_file(number).unlink(missing_ok=True)

    def release_trial(self, leased: LeasedTrial, on_purpose: bool) -> None:
        """For another worker, or for the same command typed again."""
        with self._lock:
            path = self.sweep.lease_file(leased.number)
            if (lease := leases.read_lease(path)) is not None and lease.token == leased.lease.token:
                takes = 0 if on_purpose else lease.takes
                leases.write_lease(path, replace(lease, free=True, takes=takes))

    def _require_lease(self, leased: LeasedTrial) -> None:
        lease = leases.read_lease(self.sweep.lease_file(leased.number))
        if lease is None or lease.token != leased.lease.token:
            raise LeaseLostError
