"""What runs cost: hours of GPUs or, where there is none, of processor cores, and energy.

The hours that a run held devices are Slurm's where it keeps accounts, else those between its starts
and stops. What they were spent on is told by the run's history, and spread evenly over the time
that a window such as a month cuts.
"""

from __future__ import annotations

import math
import os
import pwd
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from echelon.errors import EchelonError
from echelon.runs.accounting import QUEUE, RESTARTS, STOPPED, classify_start, measure_training
from echelon.runs.energy import read_energy
from echelon.runs.history import RunHistory, RunPhase, read_history
from echelon.runs.metrics_summary import load_summary
from echelon.runs.run_folder import Run
from echelon.runs.slurm_accounts import JobAccount, JobUse
from echelon.runs.status import FolderFacts

STEPPING, WAITING, LOST, IDLE, OTHER = "stepping", "waiting", "lost", "idle", "other"
USES = (STEPPING, WAITING, LOST, IDLE, OTHER)
"""What hours are spent on: steps that were kept; from a start to its first step; steps made again,
standstills and restarts after losses; devices of lost ranks, and of a job beside its run; programs,
which count no steps."""
SecondsByUse: TypeAlias = "dict[str, float]"
"""By USES; all of them are there."""
HISTORY, ACCOUNTS = "history", "slurm"
"""Where hours come from."""


class TimeWindow(NamedTuple):
    """From a time, which belongs to it, to another one, which does not."""

    since: float = 0.0
    until: float = math.inf

    def measure_overlap(self, start: float, end: float) -> float:
        """Return how many seconds of a time are within the window."""
        return max(0.0, min(end, self.until) - max(start, self.since))

    def measure_share(self, start: float, end: float) -> float:
        """Return which part of a time is within the window; of a moment, 1 or 0."""
        if end <= start:
            return float(self.since <= start < self.until)
        return self.measure_overlap(start, end) / (end - start)


@dataclass
class RunCost:
    """What one run, or several together, have cost within a window."""

    gpu_s: SecondsByUse = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    """Seconds of a GPU by what they were spent on, see USES."""
    cpu_s: SecondsByUse = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    """The same of a processor core, of starts without a GPU."""
    queue_s: float = 0.0
    """Between stops and the starts that Slurm's queue followed them with. It costs nothing."""
    energy_j: float | None = None
    """Of the GPUs; of Slurm's accounts, of whole nodes. None where nothing was measured."""
    sources: set[str] = field(default_factory=set)
    runs: int = 0
    is_active: bool = False
    is_estimate: bool = False
    """Whether a start did not record its devices, so that they were taken from its settings."""

    @property
    def gpu_hours(self) -> float:
        return sum(self.gpu_s.values()) / 3600

    @property
    def cpu_hours(self) -> float:
        return sum(self.cpu_s.values()) / 3600

    @property
    def has_cost(self) -> bool:
        """Whether it held anything within the window."""
        return self.gpu_hours > 0 or self.cpu_hours > 0

    def compute_shares(self) -> dict[str, float]:
        """Return the part of each use of the GPU-hours; of the CPU-hours where there are none."""
        seconds = self.gpu_s if self.gpu_hours else self.cpu_s
        total_s = sum(seconds.values())
        return {use: seconds[use] / total_s if total_s else 0.0 for use in USES}

    def add(self, other: RunCost) -> None:
        """Add what others have cost."""
        _add_seconds(self.gpu_s, other.gpu_s)
        _add_seconds(self.cpu_s, other.cpu_s)
        self.queue_s += other.queue_s
        if other.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + other.energy_j
        self.sources |= other.sources
        self.runs += other.runs
        self.is_active |= other.is_active
        self.is_estimate |= other.is_estimate


@dataclass(frozen=True)
class RunUse:
    """A run as it is read once, for any number of windows."""

    run: Run
    user: str
    history: RunHistory
    step: int | None
    is_active: bool
    settings_gpus: int
    """On each node, as its settings ask for."""
    now: float

    @classmethod
    def read(cls, run: Run, is_active: bool, now: float | None = None) -> RunUse:
        """Read the small files of a run. Damaged ones leave gaps."""
        facts, logged = FolderFacts.read(run), load_summary(run).last_training_step
        step = facts.step if logged is None else max(int(logged), facts.step or 0)
        return cls(
            run,
            find_user(run),
            read_history(run, is_running=is_active),
            step,
            is_active,
            _read_gpus_per_node(run),
            time.time() if now is None else now,
        )

    @property
    def jobs(self) -> list[str]:
        """The jobs of Slurm's in which it was started, or would have been; none of a copy, whose
        jobs are another cluster's."""
        if self.run.origin_file.exists():
            return []
        started = [phase.job for phase in self.history.phases]
        return list(dict.fromkeys(job for job in (*started, self.run.read_job_id()) if job))


def find_user(run: Run) -> str:
    """Return whose run it is: the owner of its folder."""
    try:
        uid = run.folder.stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_gpus_per_node(run: Run) -> int:
    try:
        return max(0, run.read_launch_config().launch.gpu_count)
    except (EchelonError, OSError, ValueError, RecursionError, KeyError, TypeError):
        return 0


# --- by histories ---


class PhaseUse(NamedTuple):
    """The devices of one start, and on what their time was spent, outside of any window."""

    phase: RunPhase
    ended: float
    devices: int
    is_gpu: bool
    is_estimate: bool
    starting_use: str
    training_shares: Mapping[str, float]
    """Of the time from its first step on, by use."""

    def spend(self, window: TimeWindow) -> SecondsByUse:
        """Return the seconds of devices within a window, by use."""
        trained_since = self.phase.trained_since or self.ended
        spent: SecondsByUse = dict.fromkeys(USES, 0.0)
        starting_s = window.measure_overlap(self.phase.started, trained_since)
        spent[self.starting_use] += starting_s * self.devices
        training_s = window.measure_overlap(trained_since, self.ended)
        for use, share in self.training_shares.items():
            spent[use] += training_s * share * self.devices
        return spent


def list_phase_uses(use: RunUse) -> list[PhaseUse]:
    """Return all starts of a run with what their time was spent on."""
    phases, found = use.history.phases, []
    counts_steps = all(p.first_step is not None for p in use.history.training_phases)
    times = {}
    if counts_steps:
        times = {id(t.phase): t for t in measure_training(use.history, use.step, use.now)}
    for index, phase in enumerate(phases):
        kind = STOPPED if index == 0 else classify_start(phases[index - 1], phase)
        ended = max(phase.started, use.now if phase.ended is None else phase.ended)
        shares = {OTHER: 1.0}
        if (spent := times.get(id(phase))) is not None:
            total_s = spent.kept_s + spent.redone_s + spent.standstill_s
            missing = _measure_missing_share(phase, ended)
            parts = {STEPPING: spent.kept_s, LOST: spent.redone_s + spent.standstill_s}
            shares = {name: (1 - missing) * s / (total_s or 1.0) for name, s in parts.items()}
            shares[IDLE] = missing
        devices, is_gpu, is_estimate = _count_devices(phase, use.settings_gpus)
        starting = LOST if kind == RESTARTS else WAITING
        found.append(PhaseUse(phase, ended, devices, is_gpu, is_estimate, starting, shares))
    return found


def _measure_missing_share(phase: RunPhase, ended: float) -> float:
    """Return which part of the devices of a phase had no rank while others went on."""
    if phase.trained_since is None or not phase.processes or ended <= phase.trained_since:
        return 0.0
    missing_s = 0.0
    for index, round_ in enumerate(phase.rounds):
        is_last = index + 1 == len(phase.rounds)
        until = ended if is_last else min(ended, phase.rounds[index + 1].began)
        missing = max(0, phase.processes - round_.processes)
        missing_s += missing / phase.processes * max(0.0, until - round_.began)
    return min(1.0, missing_s / (ended - phase.trained_since))


def _count_devices(phase: RunPhase, settings_gpus: int) -> tuple[int, bool, bool]:
    """Return how many devices a start had, whether they were GPUs, and whether that is an
    estimate."""
    if phase.gpus:
        return phase.gpus, True, False
    if phase.gpus == 0:
        return phase.cpus or phase.processes or 1, False, False
    if settings_gpus:
        return settings_gpus * (phase.nodes or 1), True, True
    return phase.processes or 1, False, True


# --- together ---


def compute_costs(
    uses: Sequence[RunUse],
    window: TimeWindow,
    accounts: Mapping[str, JobAccount] | None = None,
) -> list[RunCost]:
    """Return what each run has cost within a window.

    ``accounts`` are those of Slurm, by job. What a job held beyond the starts of its runs is idle
    time of these runs, in proportion to what they used of it.
    """
    accounts = accounts or {}
    phases = {id(use): list_phase_uses(use) for use in uses}
    whole = TimeWindow()
    # A job that failed before its run began has held its nodes too.
    named_by = Counter(job for use in uses for job in use.jobs)
    used: list[dict[str, float]] = []
    used_by_job: dict[str, float] = {}
    for use in uses:
        used.append({job: 0.0 for job in use.jobs if job in accounts})
        for each in phases[id(use)]:
            if (job := str(each.phase.job)) in used[-1]:
                used[-1][job] += sum(each.spend(whole).values())
        for job, seconds in used[-1].items():
            used_by_job[job] = used_by_job.get(job, 0.0) + seconds
    shares = [
        {
            job: seconds / used_by_job[job] if used_by_job[job] else 1.0 / named_by[job]
            for job, seconds in used_of_run.items()
        }
        for used_of_run in used
    ]
    return [
        _compute_cost(use, phases[id(use)], window, accounts, shares_of_jobs)
        for use, shares_of_jobs in zip(uses, shares, strict=True)
    ]


def _compute_cost(
    use: RunUse,
    phases: Iterable[PhaseUse],
    window: TimeWindow,
    accounts: Mapping[str, JobAccount],
    shares_of_jobs: Mapping[str, float],
) -> RunCost:
    cost = RunCost(runs=1, is_active=use.is_active)
    seen_gpus: dict[str, int] = {}
    spent_in_job = {job: dict.fromkeys(USES, 0.0) for job in shares_of_jobs}
    for each in phases:
        spent, job = each.spend(window), str(each.phase.job)
        if each.phase.job in accounts:
            _add_seconds(spent_in_job[job], spent)
            seen_gpus[job] = max(seen_gpus.get(job, 0), each.devices if each.is_gpu else 0)
            continue
        _add_seconds(cost.gpu_s if each.is_gpu else cost.cpu_s, spent)
        cost.sources |= {HISTORY} if sum(spent.values()) else set()
        cost.is_estimate |= each.is_estimate
    for job, spent in spent_in_job.items():
        held = accounts[job].measure(*window, use.now, seen_gpus.get(job, 0))
        _add_job(cost, held, spent, shares_of_jobs[job])
    cost.queue_s = _measure_queue_s(use.history, window)
    _add_measured_energy(cost, use, window)
    return cost


def _add_job(
    cost: RunCost,
    held: JobUse,
    spent: SecondsByUse,
    share: float,
) -> None:
    """Add what a run has had of a job: what it spent there, and its share of the rest."""
    held_s = (held.gpu_s or held.cpu_s) * share
    used_s = sum(spent.values())
    if used_s > held_s:  # clocks of hosts differ; the accounts are what is paid for
        scale = held_s / used_s
        spent = {name: seconds * scale for name, seconds in spent.items()}
    else:
        spent = spent | {IDLE: spent[IDLE] + held_s - used_s}
    _add_seconds(cost.gpu_s if held.gpu_s else cost.cpu_s, spent)
    cost.sources |= {ACCOUNTS} if held_s else set()
    if held.joules is not None:
        cost.energy_j = (cost.energy_j or 0.0) + held.joules * share


def _add_measured_energy(cost: RunCost, use: RunUse, window: TimeWindow) -> None:
    """Add what NVML has counted, unless Slurm has measured whole nodes."""
    if cost.energy_j is not None:
        return
    shares = [
        each.joules * window.measure_share(each.started, each.updated)
        for each in read_energy(use.run)
    ]
    cost.energy_j = sum(shares) if shares else None


def _measure_queue_s(history: RunHistory, window: TimeWindow) -> float:
    total_s = 0.0
    for before, phase in pairwise(history.phases):
        if before.ended is not None and classify_start(before, phase) == QUEUE:
            total_s += window.measure_overlap(before.ended, phase.started)
    return total_s


def _add_seconds(total: SecondsByUse, more: SecondsByUse) -> None:
    for use, seconds in more.items():
        total[use] += seconds


def add_up(costs: Iterable[RunCost]) -> RunCost:
    """Return what several runs have cost together."""
    total = RunCost()
    for cost in costs:
        total.add(cost)
    return total


def find_first_start(uses: Iterable[RunUse]) -> float | None:
    """Return when the first of the runs was started; None where none has a history."""
    return min((phase.started for use in uses for phase in use.history.phases), default=None)


def get_own_user() -> str:
    """Return the name of the user of this process."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
