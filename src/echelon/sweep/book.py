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

from echelon.sweep import lease as leases
from echelon.sweep.early import band, stops
from echelon.sweep.folder import Sweep
from echelon.sweep.lease import Lease, Watch
from echelon.sweep.lock import SweepLock
from echelon.sweep.search import combination, sampler, suggest
from echelon.sweep.study import open_study

if TYPE_CHECKING:
    import optuna

_IN_VAIN = 3
"""So many failures, and nothing else, from the start: the sweep is not worth going on with."""
_MOST_TAKES = 10
"""A trial that kills its workers as often before it saves is not given to another one."""
_FATAL = "fatal"
_CAUSE = "cause"
_VALUES = "values"


ENDED = ("finished", "pruned", "failed")


class Lost(Exception):
    """Somebody else has the trial by now."""


@dataclass(frozen=True)
class Taken:
    """A trial in the hands of a worker."""

    number: int
    values: dict[str, Any]
    lease: Lease


class Result(NamedTuple):
    """A trial as it stands."""

    number: int
    """In the order in which they were begun."""
    name: str
    """The number; on wandb's server, its id there."""
    run: str
    """The name of its run."""
    state: str
    """running, waiting (begun, and nobody has it), or one of ENDED."""
    value: float | None
    values: dict[str, Any]
    history: list[float]
    """Of the metric, evaluation by evaluation."""
    cause: str


class Book:
    def __init__(self, sweep: Sweep, worker: str = "") -> None:
        self.sweep, self.worker = sweep, worker
        self._file, self._settings = sweep.file(), sweep.settings()
        self._metric = sweep.metric()
        self._lock = SweepLock(sweep.lock)
        self._watch = Watch(self._settings.lease_s)
        self.study, self._flush = open_study(sweep, self._lock)
        from optuna.trial import TrialState

        self._finished = TrialState.COMPLETE
        self._states = {
            TrialState.COMPLETE: "finished",
            TrialState.PRUNED: "pruned",
            TrialState.FAIL: "failed",
        }

    # --- looking ---

    def results(self) -> list[Result]:
        return [self._result(trial) for trial in self._trials()]

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False))

    def _result(self, trial: optuna.trial.FrozenTrial) -> Result:
        history = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        value = trial.value if trial.state == self._finished else self._best(history)
        values = trial.user_attrs.get(_VALUES) or {}
        state = self._states.get(trial.state) or self._open(trial.number)
        cause = str(trial.user_attrs.get(_CAUSE, ""))
        run, number = self.sweep.run(trial.number).name, trial.number
        return Result(number, str(number), run, state, value, values, history, cause)

    def _open(self, number: int) -> str:
        left = leases.is_left(leases.read(self.sweep.lease(number)))
        return "waiting" if left else "running"

    def _best(self, history: Sequence[float]) -> float | None:
        if not history:
            return None
        return max(history) if self._metric.goal == "maximize" else min(history)

    def ending(self) -> str:
        """Why no trial is begun any more, before there are as many as were asked for; "": go on."""
        return self._ending(self._trials())

    def _ending(self, trials: Sequence[optuna.trial.FrozenTrial]) -> str:
        for trial in trials:
            if _FATAL in trial.user_attrs:
                return str(trial.user_attrs[_FATAL])
        if reached := next(filter(self._is_there, trials), None):
            return f"trial {reached.number} reached the target: {reached.value:g}"
        ended = [self._states[trial.state] for trial in trials if trial.state in self._states]
        if len(ended) >= _IN_VAIN and set(ended) == {"failed"}:
            cause = next(t.user_attrs.get(_CAUSE, "") for t in trials if t.state in self._states)
            return f"the first {len(ended)} trials failed: {cause}"
        return ""

    def _is_there(self, trial: optuna.trial.FrozenTrial) -> bool:
        target, sign = self._metric.target, self._metric.sign
        if target is None or trial.state != self._finished or trial.value is None:
            return False
        return sign * trial.value <= sign * target

    # --- changing ---

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
            self._flush()

    def take(self) -> Taken | bool:
        """A trial to work on; else whether there may be one later."""
        with self._changing():
            trials = self._trials()
            open_ones = [trial for trial in trials if trial.state not in self._states]
            for trial in open_ones:
                held = leases.read(self.sweep.lease(trial.number))
                if self._watch.is_over(held, self.worker):
                    taken = self._own(self._begun(trial), held)
                    if taken.lease.takes <= _MOST_TAKES:
                        return taken
                    often = f"{_MOST_TAKES} times in a row, from step {taken.lease.step}"
                    self._end(trial.number, "failed", f"what ran it was killed {often}")
            if len(trials) >= self._settings.cap or self._ending(trials):
                return bool(open_ones)
            return self._own(self._new(len(trials)), None)

    def _new(self, number: int) -> optuna.Trial:
        self._draw_for(number)
        if self._file.method == "grid":
            self.study.enqueue_trial(combination(self._file.searched, number))
        return self.study.ask()

    def _draw_for(self, number: int) -> None:
        method, seed = self._file.method, self._settings.seed
        self.study.sampler = sampler(method, seed, number, self.study.sampler)

    def _begun(self, trial: optuna.trial.FrozenTrial) -> optuna.Trial:
        """One whose worker is gone, perhaps before it had any value."""
        if trial.state.name == "WAITING":
            return self.study.ask()
        from optuna.trial import Trial

        self._draw_for(trial.number)
        return Trial(self.study, trial._trial_id)

    def _own(self, trial: optuna.Trial, before: Lease | None) -> Taken:
        grid = self._file.method == "grid"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = {p.name: suggest(trial, p, grid) for p in self._file.searched}
        if _VALUES not in trial.user_attrs:
            trial.set_user_attr(_VALUES, values)
        step = self.sweep.run(trial.number).newest_step()
        lease = leases.new(self.worker, before, step)
        leases.write(self.sweep.lease(trial.number), lease)
        return Taken(trial.number, values, lease)

    def beat(self, taken: Taken) -> Taken:
        """Say that this worker is there."""
        with self._lock:
            self._require_mine(taken)
            beaten = Taken(taken.number, taken.values, taken.lease.beaten())
            leases.write(self.sweep.lease(taken.number), beaten.lease)
            return beaten

    def report(self, taken: Taken, history: Sequence[float]) -> bool:
        """Note what a trial has come to; whether it is to stop here. Not worth a wait for the disk:
        a machine that goes down leaves it in the run's own file."""
        with self._lock:
            self._require_mine(taken)
            trials = self._trials()
            mine = next(trial for trial in trials if trial.number == taken.number)
            for step in range(len(mine.intermediate_values) + 1, len(history) + 1):
                self.study._storage.set_trial_intermediate_value(
                    mine._trial_id, step, history[step - 1]
                )
        early, sign = self._file.early, self._metric.sign
        if early is None or not (reached := band(early, len(history))):
            return False
        others = [
            sign * trial.intermediate_values[reached]
            for trial in trials
            if trial.number != taken.number and reached in trial.intermediate_values
        ]
        return stops(early, sign * history[reached - 1], others)

    def end(self, taken: Taken, state: str, cause: str = "", fatal: bool = False) -> None:
        """The result, once and for all."""
        with self._changing():
            self._require_mine(taken)
            self._end(taken.number, state, cause, fatal)

    def _end(self, number: int, state: str, cause: str, fatal: bool = False) -> None:
        trial = next(trial for trial in self._trials() if trial.number == number)
        storage, of_trial = self.study._storage, trial._trial_id
        value = self._result(trial).value
        if cause:
            storage.set_trial_user_attr(of_trial, _CAUSE, cause)
        if fatal:
            storage.set_trial_user_attr(of_trial, _FATAL, cause)
        [wanted] = [known for known, name in self._states.items() if name == state]
        storage.set_trial_state_values(
            of_trial, wanted, None if state == "failed" or value is None else [value]
        )
        self.sweep.lease(number).unlink(missing_ok=True)

    def give_back(self, taken: Taken, on_purpose: bool) -> None:
        """For another worker, or for the same command typed again."""
        with self._lock:
            path = self.sweep.lease(taken.number)
            if (held := leases.read(path)) is not None and held.token == taken.lease.token:
                takes = 0 if on_purpose else held.takes
                leases.write(path, replace(held, free=True, takes=takes))

    def _require_mine(self, taken: Taken) -> None:
        held = leases.read(self.sweep.lease(taken.number))
        if held is None or held.token != taken.lease.token:
            raise Lost
