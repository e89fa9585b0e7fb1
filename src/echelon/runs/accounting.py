"""What became of the time of a run since its first start, by its history.

Every second belongs to steps that were kept or to one cause of loss. Evaluations and saves are part
of training: how long they took is not recorded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from echelon.runs.history import RoundRecord, RunHistory, RunPhase

STARTING = "starting"
"""From a start to its first step, but of a restart."""
RESTARTS = "restarts"
"""From a failure to the first step of the workers that their agents started again."""
QUEUE = "queue"
"""From a stop to the next start of the same Slurm job."""
STOPPED = "stopped"
"""From a stop to a start that a person or a program asked for."""
REDONE_STEPS = "redone_steps"
"""Steps after the snapshot from which the next start went on."""
REPLACED_RANKS = "replaced_ranks"
"""The standstill of all ranks when one was lost or its replacement joined."""
CAUSES = (STARTING, RESTARTS, QUEUE, STOPPED, REDONE_STEPS, REPLACED_RANKS)


@dataclass(frozen=True)
class RunAccounting:
    """The time of a run by what it was spent on."""

    wall_s: float
    """Since the first start; until the last stop, or until now while it runs."""
    effective_s: float
    """Of it, the time of steps that were kept."""
    lost_s: dict[str, float]
    """By cause; all of them are there."""
    steps_kept: int
    steps_redone: int
    starts: int
    restarts: int
    """Starts by an agent whose workers had failed."""
    requeues: int
    """Starts of a Slurm job that was queued again."""
    lost_ranks: int
    """Ranks without which the others went on."""
    replaced_ranks: int
    """Replacements that joined them."""
    fewer_processes_s: float
    """Time with fewer processes than the start had. It counts as effective: the steps are kept."""
    losses_by_host: dict[str, int]
    """How often ranks were lost on a machine, the one with most first."""

    @property
    def effective_share(self) -> float | None:
        """The part of the time that was spent on steps that were kept; None at the very start."""
        return self.effective_s / self.wall_s if self.wall_s > 0 else None

    @property
    def is_disturbed(self) -> bool:
        """Whether anything was lost but the time of one start."""
        return self.starts > 1 or self.lost_ranks > 0

    @property
    def has_faults(self) -> bool:
        """Whether ranks were lost or workers restarted; being stopped and resumed is no fault."""
        return self.restarts > 0 or self.lost_ranks > 0

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, as `status.json` and `echelon show --json` have them."""
        return asdict(self) | {"effective_share": self.effective_share}


def account_for_run(
    history: RunHistory, step: int | None = None, now: float | None = None
) -> RunAccounting | None:
    """Return what became of the time of a run; None for a program, which counts no steps, and for a
    run without a history.

    ``step`` is the newest step of a run that is running.
    """
    phases, now = history.phases, time.time() if now is None else now
    if not phases or any(p.first_step is None for p in history.training_phases):
        return None
    lost_s = dict.fromkeys(CAUSES, 0.0)
    restarts = requeues = 0
    for index, phase in enumerate(phases):
        kind = STARTING if index == 0 else classify_start(phases[index - 1], phase)
        gap_s = max(0.0, phase.started - _get_end(phases[index - 1], now)) if index else 0.0
        starting_s = max(0.0, (phase.trained_since or _get_end(phase, now)) - phase.started)
        lost_s[kind] += gap_s
        lost_s[RESTARTS if kind == RESTARTS else STARTING] += starting_s
        restarts += kind == RESTARTS
        requeues += kind == QUEUE
    effective_s, steps_kept, steps_redone = 0.0, 0, 0
    for times in measure_training(history, step, now):
        lost_s[REPLACED_RANKS] += times.standstill_s
        lost_s[REDONE_STEPS] += times.redone_s
        effective_s += times.kept_s
        steps_kept += times.steps_kept
        steps_redone += times.steps_redone
    rounds = [round_ for phase in phases for round_ in phase.rounds]
    return RunAccounting(
        max(0.0, _get_end(phases[-1], now) - phases[0].started),
        effective_s,
        lost_s,
        steps_kept,
        steps_redone,
        len(phases),
        restarts,
        requeues,
        sum(len(round_.lost) for round_ in rounds),
        sum(_count_replaced_ranks(phase) for phase in phases),
        sum(_measure_fewer_processes_s(phase, now) for phase in phases),
        dict(Counter(host for round_ in rounds for host in round_.hosts).most_common()),
    )


class TrainingTimes(NamedTuple):
    """What became of the training time of one phase."""

    phase: RunPhase
    kept_s: float
    redone_s: float
    standstill_s: float
    steps_kept: int
    steps_redone: int


def measure_training(history: RunHistory, step: int | None, now: float) -> Iterator[TrainingTimes]:
    """Yield the times of every phase that came as far as training, of a run that counts steps."""
    for phase, next_first_step in _iterate_with_next_first_step(history.training_phases):
        standstill_s = sum(_measure_standstill_s(round_, phase, now) for round_ in phase.rounds)
        stepping_s = max(0.0, _measure_trained_s(phase, now) - standstill_s)
        made, redone = _count_steps(phase, step, next_first_step)
        # A start that ended before its first step has made nothing that is kept.
        redone_share = redone / made if made else float(phase.ended is not None)
        redone_s = stepping_s * redone_share
        kept_s = stepping_s * (1.0 - redone_share)
        yield TrainingTimes(phase, kept_s, redone_s, standstill_s, made - redone, redone)


def classify_start(before: RunPhase, phase: RunPhase) -> str:
    """Return what the time between two starts was: restarts, queue or stopped, also where old
    histories do not say more."""
    if phase.attempt:
        return RESTARTS
    is_same_job = phase.job is not None and phase.job == before.job
    is_requeued = (phase.requeues or 0) > (before.requeues or 0)
    return QUEUE if is_same_job and is_requeued else STOPPED


def count_starts_on_request(history: RunHistory) -> int:
    """Return how often a person or a program asked for the run to start: restarts by agents and
    by the queue do not count."""
    phases = history.phases
    pairs = pairwise(phases)
    return bool(phases) + sum(classify_start(before, phase) == STOPPED for before, phase in pairs)


def _get_end(phase: RunPhase, now: float) -> float:
    return now if phase.ended is None else phase.ended


def _measure_trained_s(phase: RunPhase, now: float) -> float:
    assert phase.trained_since is not None
    return max(0.0, _get_end(phase, now) - phase.trained_since)


def _iterate_with_next_first_step(
    phases: Sequence[RunPhase],
) -> Iterator[tuple[RunPhase, int | None]]:
    """Yield every phase with the earliest step that a later one went on after."""
    for index, phase in enumerate(phases):
        later = [p.first_step for p in phases[index + 1 :] if p.first_step is not None]
        yield phase, min(later, default=None)


def _count_steps(
    phase: RunPhase, newest_step: int | None, next_first_step: int | None
) -> tuple[int, int]:
    """Return how many steps a phase made, and how many of them were made again later."""
    first = phase.first_step or 0
    last = max(first, (newest_step if phase.ended is None else phase.last_step) or 0)
    kept_until = last if next_first_step is None else max(first, min(last, next_first_step))
    return last - first + phase.redone_steps, last - kept_until + phase.redone_steps


def _measure_standstill_s(round_: RoundRecord, phase: RunPhase, now: float) -> float:
    """Return the seconds that a round cost of the training time of its phase: the end of a phase
    that was killed is that of its last line of metrics, and may be earlier."""
    assert phase.trained_since is not None
    begun = max(phase.trained_since, round_.began - round_.standstill_s)
    ended = min(round_.began, _get_end(phase, now))
    return max(0.0, ended - begun - (round_.step_s or 0.0))


def _count_replaced_ranks(phase: RunPhase) -> int:
    """Return how many ranks joined, without those that `echelon scale` added to the world."""
    joined = [rank for round_ in phase.rounds for rank in round_.joined]
    return sum(phase.processes is None or rank < phase.processes for rank in joined)


def _measure_fewer_processes_s(phase: RunPhase, now: float) -> float:
    """Return the seconds with fewer processes than at the start of the phase."""
    end, total_s = _get_end(phase, now), 0.0
    for index, round_ in enumerate(phase.rounds):
        is_last = index + 1 == len(phase.rounds)
        until = end if is_last else min(end, phase.rounds[index + 1].began)
        if phase.processes is not None and round_.processes < phase.processes:
            total_s += max(0.0, until - round_.began)
    return total_s
