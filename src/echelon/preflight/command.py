"""`echelon preflight`: would this job start, and go well, on the very nodes that it will use."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.config.schema import Config
from echelon.doctor.report import print_node_matrix
from echelon.doctor.verdict import FAIL, find_worst_state
from echelon.errors import Exit, Fault
from echelon.launch.ssh.host_check import shared_folder_token
from echelon.preflight.probe_client import ProbeGroup
from echelon.preflight.probe_commands import (
    START_TIMEOUT_S,
    ProbePlan,
    explain_missing_node,
    plan_probes,
)
from echelon.preflight.rules import (
    LinkSpeed,
    NodeObservations,
    NodeVerdict,
    evaluate_nodes,
    find_slow_links,
)

PREFLIGHT_JSON_VERSION = 1
LIMIT_S = 60.0
WAIT_S = 600.0
_INSPECT_TIMEOUT_S = 15.0
_SEND_S = 0.5
_SEND_BYTES = 256 << 20
_ANSWER_TIMEOUT_S = 8.0
_RESERVED_FOR_ALL_REDUCE_S = 15.0
_MAX_REMEASUREMENTS = 3
_MAX_ROUNDS = 8
"""Each node is measured with so many others at most."""
_MAX_ALL_REDUCE_BYTES = 64 << 20
"""Bytes, where the links are fast."""
_MIN_ALL_REDUCE_BYTES = 4096
_NEEDED_FOR_ALL_REDUCE = ("start", "versions", "tcp", "interface", "gpus", "link")
"""Without these an all-reduce would only wait for its end."""


def check_job_nodes(
    config: Config, as_json: bool = False, limit_s: float = LIMIT_S, wait_s: float = WAIT_S
) -> int:
    observations = observe_nodes(config, os.environ, limit_s, wait_s)
    verdicts = evaluate_nodes(observations)
    if as_json:
        print(json.dumps(_to_dict(observations, verdicts), indent=2))
    else:
        print_node_matrix(
            [observations.get_name(node) for node in range(len(observations.names))], verdicts
        )
    if not sys.stdout.isatty():  # the log of a job has to end with the cause
        sys.stdout.flush()
        for node, verdict in verdicts:
            if verdict.state == FAIL:
                what = f"{observations.get_name(node)}, {verdict.check}: {verdict.found}"
                print(f"error: {Fault(what, verdict.do)}", file=sys.stderr)
    return Exit.NOT_READY if _find_worst_state(verdicts) == FAIL else Exit.OK


def _find_worst_state(findings: Sequence[NodeVerdict]) -> str:
    return find_worst_state(finding.verdict for finding in findings)


def observe_nodes(
    config: Config, env: Mapping[str, str], limit_s: float, wait_s: float
) -> NodeObservations:
    """Everything that can be found out within the limit; the nodes are waited for before."""
    plan = plan_probes(config, env)
    observations = NodeObservations(config.launch.kind, plan.names)
    start_s = wait_s if config.launch.kind == "slurm" else START_TIMEOUT_S
    if config.launch.kind == "slurm" and "SLURM_JOB_ID" not in env:
        count = len(plan.names)
        print(f"waiting for {count} nodes in Slurm's queue, {wait_s:g} s at most", file=sys.stderr)
    root = Path(config.run.dir).absolute()
    with shared_folder_token(root) as token, ProbeGroup(plan.commands) as conductor:
        missing = conductor.wait_for_nodes(start_s)
        absent = {
            node: explain_missing_node(config, plan.names[node], gone, start_s)
            for node, gone in missing.items()
        }
        observations = replace(observations, absent={n: (f.what, f.do) for n, f in absent.items()})
        here = [n for n in range(len(plan.names)) if n not in absent]
        if not here:
            return observations
        deadline = time.monotonic() + limit_s
        order = {
            "config": config.to_dict(),
            "nodes": len(plan.names),
            "key": secrets.token_hex(16),
            "token": str(token),
            "folder": str(root / (config.run.name or "")),
        }
        looks = conductor.ask_nodes(
            dict.fromkeys(here, order), "look", min(limit_s, _INSPECT_TIMEOUT_S)
        )
        observations = replace(observations, looks=looks)
        return _observe_network(conductor, observations, plan, deadline)


def _observe_network(
    conductor: ProbeGroup, observations: NodeObservations, plan: ProbePlan, deadline: float
) -> NodeObservations:
    """What takes several nodes."""
    there = {n: a for n, a in observations.looks.items() if "trouble" not in a}
    nodes = [
        {"node": n, "host": a["host"], "address": a["address"], "port": a["port"]}
        for n, a in sorted(there.items())
    ]
    if not nodes:
        return observations
    order = {"nodes": nodes}
    meets = conductor.ask_nodes(
        dict.fromkeys(there, order), "meet", _cap_time_left_s(deadline, _INSPECT_TIMEOUT_S)
    )
    observations = replace(observations, meets=meets)
    cut_off = [n for n in there if any((meets.get(n, {}).get("tcp") or {"": "no"}).values())]
    whole = len(there) == len(plan.names)
    if len(there) > 1 and not cut_off:
        observations = replace(observations, links=_measure_links(conductor, there, deadline))
    if (
        not whole
        or (cut_off and len(there) > 1)
        or any(k.bytes_per_s is None for k in observations.links)
    ):
        return replace(observations, not_reduced="not tried: not all nodes reach each other")
    if faults := [
        f
        for f in evaluate_nodes(observations)
        if f.verdict.state == FAIL and f.verdict.check in _NEEDED_FOR_ALL_REDUCE
    ]:
        node, verdict = faults[0]
        return replace(
            observations,
            not_reduced=f"not tried: see {verdict.check} of {observations.get_name(node)}",
        )
    return _run_all_reduce(conductor, observations, plan, deadline)


def _cap_time_left_s(deadline: float, max_s: float) -> float:
    return max(0.5, min(max_s, deadline - time.monotonic()))


def _measure_links(
    conductor: ProbeGroup, there: Mapping[int, Mapping[str, Any]], deadline: float
) -> list[LinkSpeed]:
    """Pairs that share no node at the same time, first one way, then the other. What looks slow is
    measured again alone: a busy machine looks like a slow cable, for a moment. What is slow only
    beside the others gets more chances."""
    last = deadline - _RESERVED_FOR_ALL_REDUCE_S
    ways = [
        [(a, b) if forward else (b, a) for a, b in pairs]
        for pairs in _pair_in_rounds(sorted(there))
        for forward in (True, False)
    ]
    links: list[LinkSpeed] = []
    for pairs in ways:
        if time.monotonic() < last:
            links += _measure_pairs(conductor, there, pairs)
    for attempt in range(_MAX_REMEASUREMENTS):
        for link in find_slow_links(links, only_in_comparison=attempt > 0):
            if time.monotonic() < last:
                (again,) = _measure_pairs(conductor, there, [link[:2]])
                links[links.index(link)] = max(link, again, key=lambda k: k.bytes_per_s or 0.0)
    return links


def _measure_pairs(
    conductor: ProbeGroup,
    there: Mapping[int, Mapping[str, Any]],
    ways: Sequence[tuple[int, int]],
) -> list[LinkSpeed]:
    orders = {
        a: {
            "address": there[b]["address"],
            "port": there[b]["port"],
            "limit_s": _SEND_S,
            "limit_bytes": _SEND_BYTES,
        }
        for a, b in ways
    }
    answers = conductor.ask_nodes(orders, "send", _SEND_S + _ANSWER_TIMEOUT_S)
    return [_make_link_speed(a, b, answers.get(a)) for a, b in ways]


def _pair_in_rounds(nodes: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Round robin: one stays, the others go round the table."""
    table: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(min(len(table) - 1, _MAX_ROUNDS)):
        pairs = zip(table[: len(table) // 2], reversed(table[len(table) // 2 :]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        table = [table[0], table[-1], *table[1:-1]]


def _make_link_speed(a: int, b: int, answer: dict[str, Any] | None) -> LinkSpeed:
    if answer is None or "trouble" in answer:
        return LinkSpeed(a, b, None, str((answer or {}).get("trouble", "no answer in time")))
    return LinkSpeed(a, b, answer["bytes"] / answer["s"])


def _run_all_reduce(
    conductor: ProbeGroup, observations: NodeObservations, plan: ProbePlan, deadline: float
) -> NodeObservations:
    slowest = min(
        (k.bytes_per_s for k in observations.links if k.bytes_per_s), default=float("inf")
    )
    bytes_ = int(
        max(_MIN_ALL_REDUCE_BYTES, min(_MAX_ALL_REDUCE_BYTES, slowest))
    )  # a second's worth
    counts = {}
    for node, answer in sorted(observations.looks.items()):
        procs, visible = plan.procs[node], answer["visible"]
        wanted = procs * plan.devices if procs else visible  # every device is to be tried
        counts[node] = min(wanted, visible) if visible else procs or 1
    left_s = deadline - time.monotonic() - 1
    if left_s < 3:
        return replace(observations, not_reduced="not tried: out of time", out_of_time=True)
    first = observations.looks[0]
    common = {
        "host": first["address"],
        "port": first["free_port"],
        "size": sum(counts.values()),
        "numbers": bytes_ // 4,
        "limit_s": left_s,
    }
    orders, begin = {}, 0
    for node, count in counts.items():
        orders[node] = {**common, "first": begin, "count": count}
        begin += count
    answers = conductor.ask_nodes(orders, "reduce", left_s + 1, is_collective=True)
    return replace(observations, reduces=answers, reduced_bytes=bytes_ // 4 * 4)


def _to_dict(observations: NodeObservations, findings: Sequence[NodeVerdict]) -> dict[str, object]:
    slowest = observations.find_slowest_node()
    return {
        "version": PREFLIGHT_JSON_VERSION,
        "launcher": observations.kind,
        "ready": _find_worst_state(findings) != FAIL,
        "nodes": [
            {
                "node": n,
                "host": observations.get_name(n),
                "address": observations.looks.get(n, {}).get("address"),
            }
            for n in range(len(observations.names))
        ],
        "checks": [
            {"node": f.node, "host": observations.get_name(f.node), **f.verdict._asdict()}
            for f in findings
        ],
        "links": [
            {
                "from": observations.get_name(k.sender),
                "to": observations.get_name(k.receiver),
                "bytes_per_s": k.bytes_per_s and round(k.bytes_per_s),
            }
            for k in observations.links
        ],
        "slowest": None if slowest is None else observations.get_name(slowest),
    }
