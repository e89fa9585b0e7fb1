"""`echelon preflight`: would a job start, and run well, on the nodes that it will use?"""

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
from echelon.doctor.verdict import FAIL, Verdict, find_worst_state
from echelon.errors import ExitCode, Fault
from echelon.hosts.ask import join_last_lines
from echelon.launch.launcher import Launcher
from echelon.launch.plan import ProbeExit, ProbePlan
from echelon.launch.registry import make_launcher
from echelon.launch.ssh.host_check import create_shared_folder_token
from echelon.preflight.probe_client import ProbeGroup
from echelon.preflight.report import print_verdict_matrix
from echelon.preflight.rules import (
    LinkSpeed,
    NodeObservations,
    NodeVerdict,
    evaluate_nodes,
    find_slow_links,
)
from echelon.runs.preflight_results import record_preflight_results

PREFLIGHT_JSON_VERSION = 1
LIMIT_S = 60.0
"""For all checks together, once the probes have started."""
WAIT_S = 600.0
"""For a queue to allocate the nodes."""
_PROBE_ARGV = (sys.executable, "-m", "echelon.preflight.node_probe")
_START_TIMEOUT_S = 60.0
"""How long a login and the start of Python may take on a busy machine."""
_INSPECT_TIMEOUT_S = 15.0
_SEND_S = 0.5
_SEND_BYTES = 256 << 20
_ANSWER_TIMEOUT_S = 8.0
_RESERVED_FOR_ALL_REDUCE_S = 15.0
_MAX_REMEASUREMENTS = 3
_MAX_ROUNDS = 8
"""A node is measured with at most this many others, so that large jobs are checked in time."""
_MAX_ALL_REDUCE_BYTES = 64 << 20
_MIN_ALL_REDUCE_BYTES = 4096
_FLOAT_BYTES = 4
_NEEDED_FOR_ALL_REDUCE = ("start", "versions", "tcp", "interface", "gpus", "link")
"""If one of these checks fails, an all-reduce would hang until its timeout."""


def run_node_checks(
    config: Config, as_json: bool = False, limit_s: float = LIMIT_S, wait_s: float = WAIT_S
) -> int:
    """Check the nodes of a job and print the verdicts; return the exit code."""
    return report_node_checks(check_nodes(config, limit_s, wait_s), config.run.name, as_json)


def check_nodes(config: Config, limit_s: float = LIMIT_S, wait_s: float = WAIT_S) -> dict[str, Any]:
    """Check the nodes of a job, and return what ``--json`` prints."""
    observations = observe_nodes(config, os.environ, limit_s, wait_s)
    return _to_dict(observations, evaluate_nodes(observations))


def report_node_checks(document: dict[str, Any], run_name: str | None, as_json: bool) -> int:
    """Record and print what came of the checks; return the exit code."""
    record_preflight_results(document, run_name, os.environ)
    names = [str(node["host"]) for node in document["nodes"]]
    verdicts = [
        NodeVerdict(each["node"], Verdict(*(each[key] for key in Verdict._fields)))
        for each in document["checks"]
    ]
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        print_verdict_matrix(names, verdicts)
    if not sys.stdout.isatty():  # the log of a job has to end with the cause
        sys.stdout.flush()
        for node, verdict in verdicts:
            if verdict.state == FAIL:
                what = f"{names[node]}, {verdict.check}: {verdict.found}"
                print(f"error: {Fault(what, verdict.do)}", file=sys.stderr)
    return ExitCode.NOT_READY if _is_failed(verdicts) else ExitCode.OK


def _is_failed(verdicts: Sequence[NodeVerdict]) -> bool:
    return find_worst_state(verdict for _, verdict in verdicts) == FAIL


def observe_nodes(
    config: Config, env: Mapping[str, str], limit_s: float, wait_s: float
) -> NodeObservations:
    """Return everything that can be found out within the limit.

    The limit begins when the nodes are there; in a queue they are waited for up to ``wait_s``.
    """
    launcher = make_launcher(config)
    plan = launcher.plan_probes(config, env, _PROBE_ARGV)
    node_count = len(plan.names)
    observations = NodeObservations(launcher, plan.names)
    start_s = wait_s if launcher.queue else _START_TIMEOUT_S
    if plan.is_queued:
        print(
            f"waiting for {node_count} nodes in {launcher.queue}, {wait_s:g} s at most",
            file=sys.stderr,
        )
    root = Path(config.run.dir).absolute()
    with create_shared_folder_token(root) as token, ProbeGroup(plan.commands) as probes:
        # 1. Start: a node without a probe is missing, and the others are checked without it.
        missing = {
            node: _explain_missing_node(launcher, config, plan.names[node], probe_exit, start_s)
            for node, probe_exit in probes.wait_for_nodes(start_s).items()
        }
        observations = replace(
            observations, missing_nodes={n: (fault.what, fault.do) for n, fault in missing.items()}
        )
        started = [node for node in range(node_count) if node not in missing]
        if not started:
            return observations
        deadline = time.monotonic() + limit_s
        # 2. Each node by itself.
        arguments = {
            "config": config.to_dict(),
            "node_count": node_count,
            "key": secrets.token_hex(16),
            "token": str(token),
            "folder": str(root / (config.run.name or "")),
        }
        timeout_s = min(limit_s, _INSPECT_TIMEOUT_S)
        answers = probes.ask_nodes(dict.fromkeys(started, arguments), "inspect_node", timeout_s)
        observations = replace(observations, node_answers=answers)
        return _observe_network(probes, observations, plan, config.replica.devices, deadline)


def _explain_missing_node(
    launcher: Launcher, config: Config, name: str, probe_exit: ProbeExit | None, limit_s: float
) -> Fault:
    """Return the fault for a node whose probe did not start; no exit means that it still runs."""
    if probe_exit is None:
        remedy = launcher.suggest_after_probe_timeout(config)
        return Fault(f"{name} did not start within {limit_s:g} s", remedy)
    if fault := launcher.explain_failed_probe(config, name, probe_exit):
        return fault
    reason = join_last_lines(probe_exit.output) or f"exit code {probe_exit.code}"
    remedy = launcher.suggest_after_failed_probe()
    return Fault(f"no check could be started on {name}: {reason}", remedy)


def _observe_network(
    probes: ProbeGroup,
    observations: NodeObservations,
    plan: ProbePlan,
    devices_per_process: int,
    deadline: float,
) -> NodeObservations:
    """Return the observations with those that concern several nodes added."""
    usable = {n: a for n, a in observations.node_answers.items() if "trouble" not in a}
    if not usable:
        return observations
    # 3. The network of each node: names, interface, TCP, clock.
    nodes = [
        {"node": n, "host": a["host"], "address": a["address"], "port": a["port"]}
        for n, a in sorted(usable.items())
    ]
    timeout_s = _cap_time_left_s(deadline, _INSPECT_TIMEOUT_S)
    orders = {node: {"nodes": nodes} for node in usable}
    answers = probes.ask_nodes(orders, "inspect_network", timeout_s)
    observations = replace(observations, network_answers=answers)
    # 4. The speed of links, if all nodes reach each other.
    has_several = len(usable) > 1
    is_cut_off = has_several and any(
        any((answers.get(n, {}).get("tcp") or {"": "no"}).values()) for n in usable
    )
    if has_several and not is_cut_off:
        observations = replace(observations, links=_measure_links(probes, usable, deadline))
    # 5. An all-reduce, unless it is known that it would hang.
    is_complete = len(usable) == len(plan.names)
    if not is_complete or is_cut_off or any(k.bytes_per_s is None for k in observations.links):
        reason = "not tried: not all nodes reach each other"
        return replace(observations, all_reduce_skipped=reason)
    for node, verdict in evaluate_nodes(observations):
        if verdict.state == FAIL and verdict.check in _NEEDED_FOR_ALL_REDUCE:
            reason = f"not tried: see {verdict.check} of {observations.get_name(node)}"
            return replace(observations, all_reduce_skipped=reason)
    return _run_all_reduce(probes, observations, plan, devices_per_process, deadline)


def _cap_time_left_s(deadline: float, max_s: float) -> float:
    return max(0.5, min(max_s, deadline - time.monotonic()))


# --- the speed of links ---


def _measure_links(
    probes: ProbeGroup, answers: Mapping[int, Mapping[str, Any]], deadline: float
) -> list[LinkSpeed]:
    """Measure the links between nodes in both directions.

    Pairs that share no node are measured at the same time. A slow link is measured again alone,
    because a machine that is busy for a moment looks like a slow cable; one that is slow only in
    comparison with others gets more chances.
    """
    last_start = deadline - _RESERVED_FOR_ALL_REDUCE_S
    rounds = [
        [(a, b) if is_forward else (b, a) for a, b in pairs]
        for pairs in _pair_in_rounds(sorted(answers))
        for is_forward in (True, False)
    ]
    links: list[LinkSpeed] = []
    for pairs in rounds:
        if time.monotonic() < last_start:
            links += _measure_pairs(probes, answers, pairs)
    for attempt in range(_MAX_REMEASUREMENTS):
        for link in find_slow_links(links, only_in_comparison=attempt > 0):
            if time.monotonic() < last_start:
                (again,) = _measure_pairs(probes, answers, [link[:2]])
                links[links.index(link)] = max(link, again, key=lambda k: k.bytes_per_s or 0.0)
    return links


def _measure_pairs(
    probes: ProbeGroup,
    answers: Mapping[int, Mapping[str, Any]],
    pairs: Sequence[tuple[int, int]],
) -> list[LinkSpeed]:
    """Measure from the first node of each pair to the second, all at the same time."""
    orders = {
        sender: {
            "address": answers[receiver]["address"],
            "port": answers[receiver]["port"],
            "limit_s": _SEND_S,
            "limit_bytes": _SEND_BYTES,
        }
        for sender, receiver in pairs
    }
    measured = probes.ask_nodes(orders, "measure_link", _SEND_S + _ANSWER_TIMEOUT_S)
    return [_make_link_speed(*pair, measured.get(pair[0])) for pair in pairs]


def _pair_in_rounds(nodes: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, as a round-robin tournament: one stays, the others rotate."""
    table: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(min(len(table) - 1, _MAX_ROUNDS)):
        pairs = zip(table[: len(table) // 2], reversed(table[len(table) // 2 :]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        table = [table[0], table[-1], *table[1:-1]]


def _make_link_speed(sender: int, receiver: int, answer: dict[str, Any] | None) -> LinkSpeed:
    if answer is None or "trouble" in answer:
        trouble = str((answer or {}).get("trouble", "no answer in time"))
        return LinkSpeed(sender, receiver, None, trouble)
    return LinkSpeed(sender, receiver, answer["bytes"] / answer["took_s"])


# --- the all-reduce ---


def _run_all_reduce(
    probes: ProbeGroup,
    observations: NodeObservations,
    plan: ProbePlan,
    devices_per_process: int,
    deadline: float,
) -> NodeObservations:
    """Run a rank for every device that the job would use, and all-reduce across them."""
    rates = [link.bytes_per_s for link in observations.links if link.bytes_per_s]
    # As much as the slowest link carries in a second.
    size_bytes = int(
        max(_MIN_ALL_REDUCE_BYTES, min(_MAX_ALL_REDUCE_BYTES, min(rates, default=float("inf"))))
    )
    number_count = size_bytes // _FLOAT_BYTES
    rank_counts = {}
    for node, answer in sorted(observations.node_answers.items()):
        procs, gpu_count = plan.procs[node], answer["visible_gpus"]
        wanted = procs * devices_per_process if procs else gpu_count
        rank_counts[node] = min(wanted, gpu_count) if gpu_count else procs or 1
    left_s = deadline - time.monotonic() - 1
    if left_s < 3:
        reason = "not tried: out of time"
        return replace(observations, all_reduce_skipped=reason, is_out_of_time=True)
    common = {
        "master_address": observations.node_answers[0]["address"],
        "master_port": observations.node_answers[0]["free_port"],
        "world_size": sum(rank_counts.values()),
        "number_count": number_count,
        "limit_s": left_s,
    }
    orders, first_rank = {}, 0
    for node, rank_count in rank_counts.items():
        orders[node] = {**common, "first_rank": first_rank, "rank_count": rank_count}
        first_rank += rank_count
    answers = probes.ask_nodes(orders, "run_ranks", left_s + 1, is_collective=True)
    return replace(
        observations, all_reduce_answers=answers, all_reduce_bytes=number_count * _FLOAT_BYTES
    )


def _to_dict(observations: NodeObservations, verdicts: Sequence[NodeVerdict]) -> dict[str, Any]:
    """Return the document of ``--json``."""
    name = observations.get_name
    slowest_node = observations.find_slowest_node()
    return {
        "version": PREFLIGHT_JSON_VERSION,
        "launcher": observations.launcher.name,
        "ready": not _is_failed(verdicts),
        "nodes": [
            {
                "node": node,
                "host": name(node),
                "address": observations.node_answers.get(node, {}).get("address"),
            }
            for node in range(len(observations.node_names))
        ],
        "checks": [
            {"node": node, "host": name(node), **verdict._asdict()} for node, verdict in verdicts
        ],
        "links": [
            {
                "from": name(link.sender),
                "to": name(link.receiver),
                "bytes_per_s": link.bytes_per_s and round(link.bytes_per_s),
            }
            for link in observations.links
        ],
        "slowest": None if slowest_node is None else name(slowest_node),
    }
