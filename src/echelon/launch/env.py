"""launch=env: the same command on every node of a cluster that sets the general-purpose variables.

There WORLD_SIZE counts nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon import runs
from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.launch.node import network_variables, serve, variables
from echelon.launch.plan import (
    Here,
    Node,
    Plan,
    left_idle,
    on_failure,
    places,
    process_count,
    what_runs,
)
from echelon.runs import Run

if TYPE_CHECKING:
    import torch.distributed as dist

_NEEDED = {
    "MASTER_ADDR": "the address of node 0",
    "MASTER_PORT": "a free port there",
    "WORLD_SIZE": "the number of nodes",
    "NODE_RANK": "this node's number, from 0",
}


def plan(config: Config, here: Here) -> Plan:
    rank, count, host, port = _facts(here.env)
    procs = process_count(config, here.visible)
    hosts = [here.host if node == rank else f"node {node}" for node in range(count)]
    return Plan(
        "env",
        places(hosts, [procs] * count, here.visible, config.replica.devices),
        variables(config, procs, here.env) | network_variables(config, host, here.env),
        (
            f"meet the other {count - 1} node{'s' * (count != 2)} at {host}:{port}"
            + (", which this node hosts" if rank == 0 else ""),
            f"fork {procs} worker{'s' * (procs > 1)} here under torchrun's elastic agent: "
            + what_runs(config),
            *left_idle(config, procs, here.visible),
            on_failure(config),
        ),
    )


def carry_out(config: Config, plan: Plan) -> int:
    rank, count, host, port = _facts(os.environ)
    procs = len(plan.places) // count
    os.environ |= dict(plan.variables)
    node = Node(rank, count, procs, host, port)
    return serve(config, node, partial(_agreed_run, config, node))


def _agreed_run(config: Config, node: Node, store: dist.Store, ask: Callable[[str], str]) -> Run:
    """Node 0 makes the folder; another node finds the same one, or makes its own at that path."""
    if node.rank == 0:
        run = runs.create(config)
        store.set("run", str(run.folder))
        return run
    return runs.adopt(Path(ask("run")), config)


def _facts(env: Mapping[str, str]) -> tuple[int, int, str, int]:
    faults = [
        Fault(f"launch=env, but {name} is not set", f"set it to {what}: {name}=…")
        for name, what in _NEEDED.items()
        if not env.get(name)
    ]
    numbers = {n: env.get(n, "") for n in ("MASTER_PORT", "WORLD_SIZE", "NODE_RANK")}
    faults += [
        Fault(f"{name}={text} is no whole number", f"set it to {_NEEDED[name]}")
        for name, text in numbers.items()
        if text and not text.isdecimal()
    ]
    if faults:
        raise EchelonError(*faults)
    port, count, rank = (int(numbers[n]) for n in ("MASTER_PORT", "WORLD_SIZE", "NODE_RANK"))
    if rank >= count:
        raise EchelonError(
            Fault(
                f"NODE_RANK={rank}, but WORLD_SIZE={count} (the number of nodes)",
                f"give the nodes the ranks 0 to {count - 1}",
            )
        )
    return rank, count, env["MASTER_ADDR"], port
