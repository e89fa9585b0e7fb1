"""What jobs have held of a cluster, from Slurm's accounting where one is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.runs.slurm_queue import get_last_error_line, run_slurm_command

_FIELDS = "JobID,JobIDRaw,Start,End,AllocCPUS,AllocTRES,ConsumedEnergyRaw"
_NO_VALUE = 1 << 60
"""Slurm prints its marks for a missing value as a number near 2^64, or 2^32 - 2."""
_NO_VALUES_32 = (2**32 - 1, 2**32 - 2)
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TYPED_GPUS = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_JOBS_PER_QUESTION = 500


class JobStart(NamedTuple):
    """One allocation of a job; a job that was queued again has several."""

    started: float
    ended: float | None
    """None while it runs."""
    gpus: int
    cpus: int
    joules: float | None
    """Of its nodes; None where the cluster does not measure it."""


class JobUse(NamedTuple):
    """What a job held within a time."""

    gpu_s: float
    cpu_s: float
    joules: float | None


@dataclass
class JobAccount:
    """All allocations of one job."""

    starts: list[JobStart] = field(default_factory=list)

    def measure(self, since: float, until: float, now: float, gpus: int = 0) -> JobUse:
        """Return what it held within a time. ``gpus`` is how many its run saw, for a cluster that
        does not account for GPUs (AccountingStorageTRES)."""
        gpu_s, cpu_s, joules = 0.0, 0.0, None
        for each in self.starts:
            ended = now if each.ended is None else each.ended
            held_s = max(0.0, min(ended, until) - max(each.started, since))
            gpu_s += held_s * (each.gpus or gpus)
            cpu_s += held_s * each.cpus
            if each.joules is not None and ended > each.started:
                joules = (joules or 0.0) + each.joules * held_s / (ended - each.started)
        return JobUse(gpu_s, cpu_s, joules)


class SlurmAccounts(NamedTuple):
    """What Slurm's accounting says."""

    jobs: dict[str, JobAccount]
    error: str = ""
    """Why it says nothing; empty if it was not asked or has answered."""


def query_accounts(jobs: Sequence[str]) -> SlurmAccounts:
    """Ask for the allocations of jobs, by their ids as runs know them. Slurm is asked once for
    several hundred jobs."""
    found: dict[str, JobAccount] = {}
    for first in range(0, len(jobs), _JOBS_PER_QUESTION):
        ids = ",".join(sorted({job.partition("_")[0] for job in jobs[first:][:_JOBS_PER_QUESTION]}))
        # Times in seconds since 1970: sacct writes those of its own time zone without naming it.
        words = ("sacct", "-n", "-P", "-D", "-j", ids, "-o", _FIELDS)
        done = run_slurm_command("env", "SLURM_TIME_FORMAT=%s", *words)
        if done.returncode != 0:
            return SlurmAccounts(found, get_last_error_line(done))
        _parse_lines(done.stdout.splitlines(), found)
    return SlurmAccounts({job: found[job] for job in jobs if job in found})


def _parse_lines(lines: Sequence[str], found: dict[str, JobAccount]) -> None:
    """Add the allocations of sacct's lines."""
    for ids, start in _iterate_starts(lines):
        account = JobAccount([start])
        for job in ids:
            if job in found and start not in found[job].starts:
                found[job].starts.append(start)
            found.setdefault(job, account)


def _iterate_starts(lines: Sequence[str]) -> Iterator[tuple[set[str], JobStart]]:
    """Yield each allocation with the ids of its job. The lines of its steps follow its own.

    Slurm measures whole nodes, for each step anew. Steps run at the same time, so the largest
    number counts.
    """
    ids: set[str] = set()
    start: JobStart | None = None
    for line in lines:
        parts = line.split("|")
        if len(parts) != 7:
            continue
        job, raw, began, ended, cpus, tres, energy = parts
        joules = _parse_joules(energy)
        if "." in job:
            if start is not None and joules is not None:
                start = start._replace(joules=max(start.joules or 0.0, joules))
            continue
        if start is not None:
            yield ids, start
        ids, start = {job, raw}, None
        if began.isdecimal():  # else it has not started
            end = float(ended) if ended.isdecimal() else None
            count = int(cpus) if cpus.isdecimal() else 0
            start = JobStart(float(began), end, _count_gpus(tres), count, joules)
    if start is not None:
        yield ids, start


def _count_gpus(tres: str) -> int:
    """Return the GPUs of `cpu=8,gres/gpu=4,node=1`; some clusters account for types alone."""
    if found := _GPUS.search(tres):
        return int(found[1])
    return sum(map(int, _TYPED_GPUS.findall(tres)))


def _parse_joules(text: str) -> float | None:
    if not text.isdecimal():
        return None
    value = int(text)
    return float(value) if 0 < value < _NO_VALUE and value not in _NO_VALUES_32 else None
