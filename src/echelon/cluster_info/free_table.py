"""What is free on a cluster, and when a job would start: as a table and sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.text import Text

from echelon.cluster_info.cluster_facts import (
    OLDEST_VERSION,
    ClusterFacts,
    Partition,
    format_time_limit,
)
from echelon.cluster_info.start_estimate import SoonerStart, StartEstimate
from echelon.utils.text import format_bytes, format_count, format_duration
from echelon.views.table import RowNote, Table, TableColumn

_CONDITIONS = ("idle", "mixed", "full", "down")


class JobEstimate(NamedTuple):
    """When a job with some settings would start, and what starts sooner."""

    settings: Sequence[str]
    """As they were typed."""
    estimate: StartEstimate
    sooner: Sequence[SoonerStart]
    tried: int
    defaults: Sequence[str] = ()
    """What echelon.yaml files add to them."""


def render_free(facts: ClusterFacts, job: JobEstimate | None, width: int) -> Iterator[Text]:
    """Yield the lines for a person."""
    slurm = f"Slurm {facts.version}" if facts.version else "Slurm"
    name = f"cluster {facts.cluster}" if facts.cluster else f"the cluster of {facts.host}"
    yield Text(f"{name}, {slurm}, as {facts.user} sees it at {facts.now:%Y-%m-%d %H:%M}")
    yield Text("")
    yield from _make_table(facts.partitions).render(width)
    for line in _list_remarks(facts):
        yield Text(line)
    if job is not None:
        yield Text("")
        yield from map(Text, _describe_job(facts, job))


def _make_table(partitions: Sequence[Partition]) -> Table:
    def right(title: str, cells: list[str], priority: int = 0) -> TableColumn:
        return TableColumn(title, cells, is_right_aligned=True, priority=priority)

    nodes = [p.nodes for p in partitions]
    columns = [
        TableColumn("PARTITION", [p.name + "*" * p.is_default for p in partitions]),
        *(right(title.upper(), [str(p.count(title)) for p in partitions]) for title in _CONDITIONS),
        right(
            "CPUS FREE",
            [f"{sum(n.cpus_free for n in ns)}/{sum(n.cpus_total for n in ns)}" for ns in nodes],
        ),
        right("MEMORY FREE", [_format_memory(p) for p in partitions], 2),
        TableColumn("GPUS FREE", [_format_gpus(p) for p in partitions]),
        right("TIME LIMIT", [_format_limit(p.max_time_s) for p in partitions], 1),
        right("WAITING", [str(p.waiting) for p in partitions]),
    ]
    notes = [
        RowNote(f"you cannot use it: {p.obstacle}", "yellow") if p.obstacle else None
        for p in partitions
    ]
    return Table(columns, notes if any(notes) else ())


def _format_memory(partition: Partition) -> str:
    free = sum(node.memory_free_mb for node in partition.nodes)
    return format_bytes(free * 2**20)


def _format_gpus(partition: Partition) -> str:
    counts = partition.sum_gpus().items()
    return ", ".join(f"{kind or 'gpu'} {free}/{total}" for kind, (free, total) in counts) or "none"


def _format_limit(seconds: int | None) -> str:
    return "none" if seconds is None else format_time_limit(seconds)


def _list_remarks(facts: ClusterFacts) -> Iterator[str]:
    if facts.default_partition:
        yield "* the partition of jobs that name none"
    if facts.version is not None and facts.version < OLDEST_VERSION:
        yield (
            f"Slurm {facts.version} is older than {OLDEST_VERSION}, the oldest that is looked "
            "after; what it does not know is refused with its version"
        )
    if facts.accounting_error:
        yield f"accounting does not answer, so limits are not known: {facts.accounting_error}"


def _describe_job(facts: ClusterFacts, job: JobEstimate) -> Iterator[str]:
    """The sentences about a job and its alternatives."""
    words = " ".join(job.settings)
    if job.defaults:
        words += f", and {' '.join(job.defaults)} of echelon.yaml,"
    estimate = job.estimate
    if estimate.start is None:
        yield f"a job with {words} cannot start: {estimate.reason}"
    else:
        yield f"a job with {words} would start {_describe_start(estimate, facts.now)}"
    if job.sooner:
        verb = "would start" if estimate.start is None else "would start sooner"
        yield f"with one change it {verb}:"
        width = max(len(" ".join(each.settings)) for each in job.sooner)
        for each in job.sooner:
            start = _describe_start(each.estimate, facts.now)
            yield f"  {' '.join(each.settings):<{width}}  {start}"
    elif job.tried:
        what = format_count(job.tried, "change")
        yield f"{what} of time, nodes, partition or GPUs were tried; none starts sooner"
    yield (
        "times are estimates of Slurm's (sbatch --test-only): jobs that end early or come first "
        "change them"
    )


def _describe_start(estimate: StartEstimate, now: datetime) -> str:
    wait_s = estimate.count_wait_s(now)
    where = f" on {estimate.nodes}" if estimate.nodes else ""
    if not wait_s:
        return f"now{where}"
    return f"in {format_duration(wait_s)}, at {estimate.start:%Y-%m-%d %H:%M},{where}"


# --- JSON ---


def describe_free(facts: ClusterFacts, job: JobEstimate | None) -> dict[str, Any]:
    """Return the same as plain values."""
    found: dict[str, Any] = {
        "version": 1,
        "host": facts.host,
        "cluster": facts.cluster or None,
        "slurm": str(facts.version) if facts.version else None,
        "user": facts.user,
        "time": facts.now.isoformat(),
        "partitions": [describe_partition(p) for p in facts.partitions],
    }
    if job is not None:
        found["job"] = {
            "settings": list(job.settings),
            "defaults": list(job.defaults),
            **_describe_estimate(job.estimate, facts.now),
            "tried": job.tried,
            "sooner": [
                {
                    "settings": list(each.settings),
                    **_describe_estimate(each.estimate, facts.now),
                }
                for each in job.sooner
            ],
        }
    return found


def describe_partition(partition: Partition) -> dict[str, Any]:
    """Return a partition as plain values."""
    return {
        "name": partition.name,
        "default": partition.is_default,
        "usable": not partition.obstacle,
        "obstacle": partition.obstacle or None,
        "max_time_s": partition.max_time_s,
        "nodes": {
            "total": len(partition.nodes),
            **{condition: partition.count(condition) for condition in _CONDITIONS},
        },
        "cpus": {
            "free": sum(node.cpus_free for node in partition.nodes),
            "total": sum(node.cpus_total for node in partition.nodes),
        },
        "memory_mb": {
            "free": sum(node.memory_free_mb for node in partition.nodes),
            "total": sum(node.memory_total_mb for node in partition.nodes),
        },
        "gpus": [
            {"type": kind or None, "free": free, "total": total}
            for kind, (free, total) in partition.sum_gpus().items()
        ],
        "waiting": partition.waiting,
    }


def _describe_estimate(estimate: StartEstimate, now: datetime) -> dict[str, Any]:
    return {
        "start": estimate.start.isoformat() if estimate.start else None,
        "wait_s": estimate.count_wait_s(now),
        "nodes": estimate.nodes or None,
        "partition": estimate.partition or None,
        "reason": estimate.reason or None,
    }
