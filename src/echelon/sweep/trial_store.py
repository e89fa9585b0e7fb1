"""The trials of a sweep and their results, shared by all its workers.

Every change is made under one lock, in a folder that all workers share anyway for the runs. So a
trial has one worker at a time, and there are exactly as many results as were asked for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.sweep import trial_lease as leases
from echelon.sweep.hyperband import find_band, should_stop
from echelon.sweep.optuna_study import open_study
from echelon.sweep.sampling import create_sampler, pick_combination, suggest_value
from echelon.sweep.sweep_folder import SweepFolder, SweepLock
from echelon.sweep.trial_lease import LeaseWatch, TrialLease

if TYPE_CHECKING:
    import optuna

_MAX_INITIAL_FAILURES = 3
"""A sweep whose first trials all fail ends after so many."""
_MAX_TAKES = 10
"""A trial that is killed so often without saving in between counts as failed."""
_FATAL_ATTRIBUTE = "fatal"
"""Set on a trial whose failure ends the whole sweep."""
_CAUSE_ATTRIBUTE = "cause"
_PARAMETERS_ATTRIBUTE = "values"
"""The parameters as they were given: Optuna's own are encoded."""

ENDED_STATES = ("finished", "pruned", "failed")


class LeaseLostError(Exception):
    """Another worker holds the lease of the trial now. The loser must not write any result."""


@dataclass(frozen=True)
class LeasedTrial:
    """A trial and the lease with which a worker holds it."""

    number: int
    parameters: dict[str, Any]
    lease: TrialLease


class TrialSummary(NamedTuple):
    """A trial and its result so far."""

    number: int
    """In the order in which trials were created."""
    name: str
    """The number, or the id on wandb's server."""
    run: str
    """The name of its run."""
    state: str
    """running, waiting (no worker has it), or one of ENDED_STATES."""
    metric_value: float | None
    """The best one so far."""
    parameters: dict[str, Any]
    history: list[float]
    """The metric at each evaluation."""
    cause: str
    """Why it failed, else ""."""


class TrialStore:
    """Access of one worker, or of one reader, to the trials of a sweep."""

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

    # --- reading ---

    def summarize_trials(self) -> list[TrialSummary]:
        """Return all trials with their results so far."""
        return [self._summarize(trial) for trial in self._load_trials()]

    def _load_trials(self) -> list[optuna.trial.FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False))

    def _summarize(self, trial: optuna.trial.FrozenTrial) -> TrialSummary:
        history = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        value = trial.value if trial.state == self._finished else self._find_best_value(history)
        values = trial.user_attrs.get(_PARAMETERS_ATTRIBUTE) or {}
        state = self._states.get(trial.state) or self._read_lease_state(trial.number)
        cause = str(trial.user_attrs.get(_CAUSE_ATTRIBUTE, ""))
        run, number = self.sweep.get_trial_run(trial.number).name, trial.number
        return TrialSummary(number, str(number), run, state, value, values, history, cause)

    def _read_lease_state(self, number: int) -> str:
        lease = leases.read_lease(self.sweep.get_lease_file(number))
        return "waiting" if leases.is_released_or_dead(lease) else "running"

    def _find_best_value(self, history: Sequence[float]) -> float | None:
        if not history:
            return None
        return max(history) if self._metric.goal == "maximize" else min(history)

    def find_stop_reason(self) -> str:
        """Return why no more trials start, before there are as many as asked for; "" if they do."""
        return self._determine_stop_reason(self._load_trials())

    def _determine_stop_reason(self, trials: Sequence[optuna.trial.FrozenTrial]) -> str:
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
        target, sign = self._metric.target, self._metric.minimize_sign
        if target is None or trial.state != self._finished or trial.value is None:
            return False
        return sign * trial.value <= sign * target

    # --- changing ---

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Hold the lock, and write through to the disk at the end."""
        with self._lock:
            yield
            self._flush()

    def take_trial(self) -> LeasedTrial | bool:
        """Take a trial to run; else return whether there may be one later.

        Trials whose workers are gone come first. A new one is created unless there are enough.
        """
        with self._transaction():
            trials = self._load_trials()
            # 1. Abandoned trials first: they may hold the only place that is left under run_cap,
            #    and their snapshots are lost work if nobody continues them.
            open_trials = [trial for trial in trials if trial.state not in self._states]
            for trial in open_trials:
                lease = leases.read_lease(self.sweep.get_lease_file(trial.number))
                if self._watch.is_free_to_take(lease, self.worker):
                    leased = self._lease_trial(self._reopen_trial(trial), lease)
                    if leased.lease.takes <= _MAX_TAKES:
                        return leased
                    often = f"{_MAX_TAKES} times in a row, from step {leased.lease.step}"
                    self._record_end(trial.number, "failed", f"its process was killed {often}")
            # 2. Enough trials, but some are open: their workers may still die, so wait for them.
            if len(trials) >= self._settings.run_cap or self._determine_stop_reason(trials):
                return bool(open_trials)
            # 3. A new trial. Its number is the count under the lock, so two workers never draw it.
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
        """Return a trial whose worker is gone, perhaps before it had any parameters."""
        if trial.state.name == "WAITING":
            return self.study.ask()
        from optuna.trial import Trial

        self._set_sampler(trial.number)
        return Trial(self.study, trial._trial_id)

    def _lease_trial(self, trial: optuna.Trial, previous_lease: TrialLease | None) -> LeasedTrial:
        is_grid = self._file.method == "grid"
        searched = self._file.searched_parameters
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parameters = {p.name: suggest_value(trial, p, is_grid) for p in searched}
        if _PARAMETERS_ATTRIBUTE not in trial.user_attrs:
            trial.set_user_attr(_PARAMETERS_ATTRIBUTE, parameters)
        # The lease last: a worker that dies before this leaves an open trial without a lease, which
        # the next worker takes. Parameters that were drawn until then are kept by Optuna.
        step = self.sweep.get_trial_run(trial.number).find_newest_step()
        lease = leases.build_lease(self.worker, previous_lease, step)
        leases.write_lease(self.sweep.get_lease_file(trial.number), lease)
        return LeasedTrial(trial.number, parameters, lease)

    def renew_lease(self, leased: LeasedTrial) -> LeasedTrial:
        """Send a heartbeat, and return the trial with the renewed lease.

        Raises LeaseLostError if another worker has taken the trial, as after a long pause.
        """
        with self._lock:
            self._require_lease(leased)
            lease = leased.lease.with_next_heartbeat()
            leases.write_lease(self.sweep.get_lease_file(leased.number), lease)
            return replace(leased, lease=lease)

    def report_history(self, leased: LeasedTrial, history: Sequence[float]) -> bool:
        """Record the metric of a trial so far, and return whether hyperband stops it.

        It is not flushed to the disk, which would cost more than the rest: after a crash of the
        machine the history is read again from the run's own file.
        """
        with self._lock:
            self._require_lease(leased)
            trials = self._load_trials()
            own = next(trial for trial in trials if trial.number == leased.number)
            for step in range(len(own.intermediate_values) + 1, len(history) + 1):
                self.study._storage.set_trial_intermediate_value(
                    own._trial_id, step, history[step - 1]
                )
        hyperband, sign = self._file.early_terminate, self._metric.minimize_sign
        if hyperband is None or not (band := find_band(hyperband, len(history))):
            return False
        others = [
            sign * trial.intermediate_values[band]
            for trial in trials
            if trial.number != leased.number and band in trial.intermediate_values
        ]
        return should_stop(hyperband, sign * history[band - 1], others)

    def end_trial(
        self, leased: LeasedTrial, state: str, cause: str = "", is_fatal: bool = False
    ) -> None:
        """Record the final result of a trial; `is_fatal` ends the whole sweep with it."""
        with self._transaction():
            self._require_lease(leased)
            self._record_end(leased.number, state, cause, is_fatal)

    def _record_end(self, number: int, state: str, cause: str, is_fatal: bool = False) -> None:
        trial = next(trial for trial in self._load_trials() if trial.number == number)
        storage, trial_id = self.study._storage, trial._trial_id
        value = self._summarize(trial).metric_value
        if cause:
            storage.set_trial_user_attr(trial_id, _CAUSE_ATTRIBUTE, cause)
        if is_fatal:
            storage.set_trial_user_attr(trial_id, _FATAL_ATTRIBUTE, cause)
        [final_state] = [known for known, name in self._states.items() if name == state]
        values = None if state == "failed" or value is None else [value]
        # Attributes before the state, because Optuna refuses changes of a trial that has ended; the
        # lease last, because without it an open trial would be free to take.
        storage.set_trial_state_values(trial_id, final_state, values)
        self.sweep.get_lease_file(number).unlink(missing_ok=True)

    def release_trial(self, leased: LeasedTrial, is_voluntary: bool) -> None:
        """Leave a trial to another worker, or to the same command run again.

        `is_voluntary` means that the trial was not killed, so its count of takes starts again. A
        lease that another worker holds by now is not touched.
        """
        with self._lock:
            path = self.sweep.get_lease_file(leased.number)
            if (lease := leases.read_lease(path)) is not None and lease.token == leased.lease.token:
                takes = 0 if is_voluntary else lease.takes
                leases.write_lease(path, replace(lease, is_released=True, takes=takes))

    def _require_lease(self, leased: LeasedTrial) -> None:
        lease = leases.read_lease(self.sweep.get_lease_file(leased.number))
        if lease is None or lease.token != leased.lease.token:
            raise LeaseLostError
