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

from echelon.check.conduct import Conductor
from echelon.check.judge import Finding, Link, Seen, judge, slow
from echelon.check.places import START_S, Places, stations, why_absent
from echelon.check.show import matrix
from echelon.check.verdict import FAIL, worst
from echelon.config.schema import Config
from echelon.errors import Exit, Fault
from echelon.launch.ssh.survey import token_in

JSON_VERSION = 1
LIMIT_S = 60.0
WAIT_S = 600.0
_LOOK_S = 15.0
_SEND_S = 0.5
_SEND_BYTES = 256 << 20
_ANSWER_S = 8.0
_FOR_REDUCE_S = 15.0
_AGAIN = 3
_ROUNDS = 8
"""Each node is measured with so many others at most."""
_REDUCED = 64 << 20
"""Bytes, where the links are fast."""
_LEAST_REDUCED = 4096
_NEEDED = ("start", "versions", "tcp", "interface", "gpus", "link")
"""Without these an all-reduce would only wait for its end."""


def preflight(
    config: Config, as_json: bool = False, limit_s: float = LIMIT_S, wait_s: float = WAIT_S
) -> int:
    seen = look(config, os.environ, limit_s, wait_s)
    findings = judge(seen)
    if as_json:
        print(json.dumps(_as_data(seen, findings), indent=2))
    else:
        matrix([seen.name(node) for node in range(len(seen.names))], findings)
    if not sys.stdout.isatty():  # the log of a job has to end with the cause
        sys.stdout.flush()
        for node, verdict in findings:
            if verdict.state == FAIL:
                what = f"{seen.name(node)}, {verdict.check}: {verdict.found}"
                print(f"error: {Fault(what, verdict.do)}", file=sys.stderr)
    return Exit.NOT_READY if _worst(findings) == FAIL else Exit.OK


def _worst(findings: Sequence[Finding]) -> str:
    return worst(finding.verdict for finding in findings)


def look(config: Config, env: Mapping[str, str], limit_s: float, wait_s: float) -> Seen:
    """Everything that can be found out within the limit; the nodes are waited for before."""
    places = stations(config, env)
    seen = Seen(config.launch.kind, places.names)
    start_s = wait_s if config.launch.kind == "slurm" else START_S
    if config.launch.kind == "slurm" and "SLURM_JOB_ID" not in env:
        count = len(places.names)
        print(f"waiting for {count} nodes in Slurm's queue, {wait_s:g} s at most", file=sys.stderr)
    root = Path(config.run.dir).absolute()
    with token_in(root) as token, Conductor(places.commands) as conductor:
        missing = conductor.gather(start_s)
        absent = {
            node: why_absent(config, places.names[node], gone, start_s)
            for node, gone in missing.items()
        }
        seen = replace(seen, absent={n: (f.what, f.do) for n, f in absent.items()})
        here = [n for n in range(len(places.names)) if n not in absent]
        if not here:
            return seen
        deadline = time.monotonic() + limit_s
        order = {
            "config": config.to_dict(),
            "nodes": len(places.names),
            "key": secrets.token_hex(16),
            "token": str(token),
            "folder": str(root / (config.run.name or "")),
        }
        looks = conductor.ask(dict.fromkeys(here, order), "look", min(limit_s, _LOOK_S))
        seen = replace(seen, looks=looks)
        return _between(conductor, seen, places, deadline)


def _between(conductor: Conductor, seen: Seen, places: Places, deadline: float) -> Seen:
    """What takes several nodes."""
    there = {n: a for n, a in seen.looks.items() if "trouble" not in a}
    nodes = [
        {"node": n, "host": a["host"], "address": a["address"], "port": a["port"]}
        for n, a in sorted(there.items())
    ]
    if not nodes:
        return seen
    order = {"nodes": nodes}
    meets = conductor.ask(dict.fromkeys(there, order), "meet", _left(deadline, _LOOK_S))
    seen = replace(seen, meets=meets)
    cut_off = [n for n in there if any((meets.get(n, {}).get("tcp") or {"": "no"}).values())]
    whole = len(there) == len(places.names)
    if len(there) > 1 and not cut_off:
        seen = replace(seen, links=_measure(conductor, there, deadline))
    if not whole or (cut_off and len(there) > 1) or any(k.rate is None for k in seen.links):
        return replace(seen, not_reduced="not tried: not all nodes reach each other")
    if faults := [f for f in judge(seen) if f.verdict.state == FAIL and f.verdict.check in _NEEDED]:
        node, verdict = faults[0]
        return replace(seen, not_reduced=f"not tried: see {verdict.check} of {seen.name(node)}")
    return _all_reduce(conductor, seen, places, deadline)


def _left(deadline: float, most_s: float) -> float:
    return max(0.5, min(most_s, deadline - time.monotonic()))


def _measure(
    conductor: Conductor, there: Mapping[int, Mapping[str, Any]], deadline: float
) -> list[Link]:
    """Pairs that share no node at the same time, first one way, then the other. What looks slow is
    measured again alone: a busy machine looks like a slow cable, for a moment. What is slow only
    beside the others gets more chances."""
    last = deadline - _FOR_REDUCE_S
    ways = [
        [(a, b) if forward else (b, a) for a, b in pairs]
        for pairs in _rounds(sorted(there))
        for forward in (True, False)
    ]
    links: list[Link] = []
    for pairs in ways:
        if time.monotonic() < last:
            links += _send(conductor, there, pairs)
    for attempt in range(_AGAIN):
        for link in slow(links, in_comparison=attempt > 0):
            if time.monotonic() < last:
                (again,) = _send(conductor, there, [link[:2]])
                links[links.index(link)] = max(link, again, key=lambda k: k.rate or 0.0)
    return links


def _send(
    conductor: Conductor,
    there: Mapping[int, Mapping[str, Any]],
    ways: Sequence[tuple[int, int]],
) -> list[Link]:
    orders = {
        a: {
            "address": there[b]["address"],
            "port": there[b]["port"],
            "limit_s": _SEND_S,
            "limit_bytes": _SEND_BYTES,
        }
        for a, b in ways
    }
    told = conductor.ask(orders, "send", _SEND_S + _ANSWER_S)
    return [_link(a, b, told.get(a)) for a, b in ways]


def _rounds(nodes: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Round robin: one stays, the others go round the table."""
    table: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(min(len(table) - 1, _ROUNDS)):
        pairs = zip(table[: len(table) // 2], reversed(table[len(table) // 2 :]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        table = [table[0], table[-1], *table[1:-1]]


def _link(a: int, b: int, told: dict[str, Any] | None) -> Link:
    if told is None or "trouble" in told:
        return Link(a, b, None, str((told or {}).get("trouble", "no answer in time")))
    return Link(a, b, told["bytes"] / told["s"])


def _all_reduce(conductor: Conductor, seen: Seen, places: Places, deadline: float) -> Seen:
    slowest = min((k.rate for k in seen.links if k.rate), default=float("inf"))
    bytes_ = int(max(_LEAST_REDUCED, min(_REDUCED, slowest)))  # a second's worth
    counts = {}
    for node, answer in sorted(seen.looks.items()):
        procs, visible = places.procs[node], answer["visible"]
        wanted = procs * places.devices if procs else visible  # every device is to be tried
        counts[node] = min(wanted, visible) if visible else procs or 1
    left_s = deadline - time.monotonic() - 1
    if left_s < 3:
        return replace(seen, not_reduced="not tried: out of time", out_of_time=True)
    first = seen.looks[0]
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
    told = conductor.ask(orders, "reduce", left_s + 1, together=True)
    return replace(seen, reduces=told, reduced_bytes=bytes_ // 4 * 4)


def _as_data(seen: Seen, findings: Sequence[Finding]) -> dict[str, object]:
    slowest = seen.slowest()
    return {
        "version": JSON_VERSION,
        "launcher": seen.kind,
        "ready": _worst(findings) != FAIL,
        "nodes": [
            {"node": n, "host": seen.name(n), "address": seen.looks.get(n, {}).get("address")}
            for n in range(len(seen.names))
        ],
        "checks": [
            {"node": f.node, "host": seen.name(f.node), **f.verdict._asdict()} for f in findings
        ],
        "links": [
            {
                "from": seen.name(k.sender),
                "to": seen.name(k.receiver),
                "bytes_per_s": k.rate and round(k.rate),
            }
            for k in seen.links
        ],
        "slowest": None if slowest is None else seen.name(slowest),
    }
