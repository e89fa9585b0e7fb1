"""When a job would start, by `sbatch --test-only`, and which changes would start it sooner."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from echelon.cluster_info.cluster_facts import (
    ClusterFacts,
    Partition,
    format_time_limit,
)
from echelon.cluster_info.login_probe import NO_SECTION, LoginNode, Section, build_tests_alone
from echelon.config.scalar_types import format_value
from echelon.config.schema import Config, LaunchConfig
from echelon.config.validate import find_faults, parse_sbatch_time
from echelon.launch.slurm.batch_script import count_processes_per_node, make_sbatch_options

MAX_CHANGES = 6
"""So many changes are tried at most: the controller answers one question for each."""
AT_ONCE_S = 60
"""What starts within a minute starts now: Slurm schedules in turns."""
_MIN_TIME_S = 600
"""Shorter jobs are not proposed: starting takes minutes too."""
_MAX_PARTITIONS = 2
_MAX_GPU_TYPES = 2
_STARTS = re.compile(
    r"Job \d+ to start at (\S+) using \d+ processors on (?:nodes )?(\S*)(?: in partition (\S+))?"
)
_UNTESTED_OPTIONS = ("--dependency", "--kill-on-invalid-dep", "--open-mode", "--signal")


class StartEstimate(NamedTuple):
    """Slurm's estimate for one job."""

    start: datetime | None
    """None where the job cannot start as it is."""
    nodes: str
    partition: str
    reason: str = ""
    """Why it cannot start, in Slurm's words."""

    def count_wait_s(self, now: datetime) -> int | None:
        """Return how long it would wait; 0 where it would start now."""
        if self.start is None:
            return None
        seconds = int((self.start - now).total_seconds())
        return seconds if seconds > AT_ONCE_S else 0


class LaunchChange(NamedTuple):
    """Settings that may start a job sooner, and the job with them."""

    settings: tuple[str, ...]
    """KEY=VALUE, as they would be typed."""
    config: Config


class SoonerStart(NamedTuple):
    """A change that Slurm says starts sooner."""

    settings: tuple[str, ...]
    estimate: StartEstimate


def render_test_job(config: Config) -> str:
    """Return a batch script with the options of a run's own, which does nothing."""
    options = make_sbatch_options(config, count_processes_per_node(config))
    kept = [o for o in options if not o.startswith(_UNTESTED_OPTIONS)]
    return "\n".join(["#!/bin/sh", *(f"#SBATCH {option}" for option in kept), "true", ""])


def read_estimate(section: Section) -> StartEstimate:
    """Return the estimate in what `sbatch --test-only` printed."""
    found = _STARTS.search(section.text)
    if section.exit_code == 0 and found:
        start, nodes, partition = found.groups()
        try:
            return StartEstimate(datetime.fromisoformat(start), nodes, partition or "")
        except ValueError:
            return StartEstimate(None, "", "", f"sbatch says {start} for the time")
    words = section.reason.removeprefix("sbatch: ").removeprefix("error: ")
    return StartEstimate(None, "", "", words.removeprefix("allocation failure: "))


def try_changes(
    node: LoginNode, facts: ClusterFacts, config: Config, estimate: StartEstimate
) -> tuple[list[SoonerStart], int]:
    """Return the changes that start sooner, the soonest first, and how many were tried. Nothing is
    asked about a job that would start now."""
    wait_s = estimate.count_wait_s(facts.now)
    changes = [] if wait_s == 0 else list_changes(facts, config)
    if not changes:
        return [], 0
    sections = node.ask(build_tests_alone([render_test_job(c.config) for c in changes]))
    sooner = []
    for number, change in enumerate(changes):
        found = read_estimate(sections.get(f"job {number}", NO_SECTION))
        other_s = found.count_wait_s(facts.now)
        if other_s is not None and (wait_s is None or other_s + AT_ONCE_S <= wait_s):
            sooner.append((other_s, number, SoonerStart(change.settings, found)))
    return [start for _, _, start in sorted(sooner, key=lambda each: each[:2])], len(changes)


# --- what could be changed ---


def list_changes(facts: ClusterFacts, config: Config) -> list[LaunchChange]:
    """Return changes worth asking about, each of one kind, the least painful first."""
    launch, found = config.launch, []
    for settings in _iter_settings(facts, launch):
        changed = replace(config, launch=replace(launch, **settings))
        if not find_faults(changed) and changed != config:
            words = tuple(f"launch.{k}={format_value(v)}" for k, v in settings.items())
            found.append(LaunchChange(words, changed))
    return found[:MAX_CHANGES]


def _iter_settings(facts: ClusterFacts, launch: LaunchConfig) -> Iterator[dict[str, Any]]:
    own = _list_own_partitions(facts, launch)
    # 1. The same nodes for a shorter time: a run continues over as many jobs as it needs.
    if (shorter_s := _halve_time(launch, own)) is not None:
        yield {"time": format_time_limit(shorter_s)}
    # 2. Another type of GPU that is free, in the same partition.
    yield from ({"gpus_per_node": kind} for kind in _list_gpu_requests(launch, own))
    # 3. Another partition with enough such nodes, perhaps with another type of GPU.
    for partition, gpus in _list_other_partitions(facts, launch, own):
        settings: dict[str, Any] = {"partition": partition.name}
        if gpus != launch.gpus_per_node:
            settings["gpus_per_node"] = gpus
        limit_s, asked_s = partition.max_time_s, parse_sbatch_time(launch.time or "")
        if limit_s is not None and (asked_s is None or asked_s > limit_s):
            settings["time"] = format_time_limit(limit_s)
        yield settings
    # 4. Fewer nodes, and nodes that are shared.
    if launch.spares:
        yield {"spares": 0}
    elif launch.nodes > 1:
        yield {"nodes": launch.nodes // 2}
    if launch.exclusive:
        yield {"exclusive": False}


def _list_own_partitions(facts: ClusterFacts, launch: LaunchConfig) -> list[Partition]:
    """Return the partitions that the job asks for."""
    if launch.partition is None:
        return [facts.default_partition] if facts.default_partition else []
    return [p for p in facts.partitions if p.name in launch.partition.split(",")]


def _halve_time(launch: LaunchConfig, own: Sequence[Partition]) -> int | None:
    """Return half of the job's time; of a job without a limit, an hour."""
    asked_s = parse_sbatch_time(launch.time or "")
    if asked_s is None:
        usual = [p.default_time_s or p.max_time_s for p in own]
        asked_s = usual[0] if usual and usual[0] else 7200
    return asked_s // 2 if asked_s // 2 >= _MIN_TIME_S else None


def _list_gpu_requests(launch: LaunchConfig, own: Sequence[Partition]) -> list[str]:
    """Return requests for as many GPUs of other types, those with the most free ones first."""
    free: dict[str, int] = {}
    for partition in own:
        for kind, nodes in _count_free_by_type(launch, partition).items():
            if kind != launch.gpu_type:
                free[kind] = max(nodes, free.get(kind, 0))
    best = sorted(free, key=lambda kind: (-free[kind], kind))[:_MAX_GPU_TYPES]
    return [f"{kind}:{launch.gpu_count}" for kind in best]


def _count_free_by_type(launch: LaunchConfig, partition: Partition) -> dict[str, int]:
    """Return the types of GPUs of which enough nodes have enough, and on how many nodes these are
    free now. It is empty for a job that takes any type."""
    if launch.gpu_type is None:
        return {}
    count, wanted = launch.gpu_count, launch.nodes + launch.spares
    nodes = partition.usable_nodes
    kinds = {kind for node in nodes for kind in node.gpus_total if kind}
    return {
        kind: sum(node.gpus_free.get(kind, 0) >= count for node in nodes)
        for kind in sorted(kinds)
        if sum(node.gpus_total.get(kind, 0) >= count for node in nodes) >= wanted
    }


def _list_other_partitions(
    facts: ClusterFacts, launch: LaunchConfig, own: Sequence[Partition]
) -> list[tuple[Partition, int | str | None]]:
    """Return partitions that the user may use and that have such nodes, each with the GPUs to ask
    for there, those with the most free nodes first."""
    wanted = launch.nodes + launch.spares
    found: list[tuple[int, Partition, int | str | None]] = []
    for partition in facts.partitions:
        is_too_small = partition.max_nodes is not None and partition.max_nodes < wanted
        if partition in own or partition.obstacle or is_too_small:
            continue
        nodes, free = partition.usable_nodes, _count_free_by_type(launch, partition)
        if launch.gpu_type and free:
            kind = launch.gpu_type if launch.gpu_type in free else max(free, key=lambda k: free[k])
            found.append((free[kind], partition, f"{kind}:{launch.gpu_count}"))
        elif not launch.gpu_type:
            fit = [n for n in nodes if sum(n.gpus_total.values()) >= launch.gpu_count]
            now = [n for n in fit if n.cpus_free and sum(n.gpus_free.values()) >= launch.gpu_count]
            if len(fit) >= wanted:
                found.append((len(now), partition, launch.gpus_per_node))
    best = sorted(found, key=lambda each: -each[0])[:_MAX_PARTITIONS]
    return [(partition, gpus) for _, partition, gpus in best]
