"""launch=env: the same command on every node of a cluster that sets the general-purpose variables.

MASTER_ADDR, MASTER_PORT, WORLD_SIZE and NODE_RANK are set by the cluster, and WORLD_SIZE counts
nodes, not processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from echelon.config.schema import Config
from echelon.config.validate import check_node_counts
from echelon.errors import EchelonError, Fault
from echelon.launch.launcher import Launcher, LaunchServices
from echelon.launch.node.service import make_network_variables, make_thread_variables, run_node
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    NodeSpec,
    count_local_processes,
    describe_failure_policy,
    describe_idle_devices,
    describe_node_policy,
    describe_program_or_experiment,
    place_ranks,
)
from echelon.runs.create import adopt_run, create_run
from echelon.runs.run_folder import Run
from echelon.world.network_key import KEY_VARIABLE, read_key
from echelon.world.sealed_store import SealedStore

_REQUIRED_VARIABLES = {
    "MASTER_ADDR": "the address of node 0",
    "MASTER_PORT": "a free port there",
    "WORLD_SIZE": "the number of nodes",
    "NODE_RANK": "this node's number, from 0",
}


class EnvLauncher(Launcher):
    """One node of several, on each of which the same command is typed."""

    name = "env"

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        rank, total, host, port = read_node_variables(machine.env)
        if faults := [*check_node_counts(config.launch, total)]:
            raise EchelonError(*faults)
        count = total - config.launch.spares
        procs = count_local_processes(config, machine.visible_devices)
        hosts = [machine.host if node == rank else f"node {node}" for node in range(count)]
        return LaunchPlan(
            self.name,
            place_ranks(hosts, [procs] * count, machine.visible_devices, config),
            make_thread_variables(config, procs, machine.env)
            | make_network_variables(config, host, machine.env),
            (
                f"meet the other {total - 1} node{'s' * (total != 2)} at {host}:{port}"
                + (", which this node hosts" if rank == 0 else ""),
                *_describe_key(config, total, machine.env),
                f"fork {procs} worker{'s' * (procs > 1)} here under torchrun's elastic agent: "
                + describe_program_or_experiment(config),
                *describe_idle_devices(config, procs, machine.visible_devices),
                describe_failure_policy(config, procs * count),
                *describe_node_policy(config, count),
            ),
        )

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        """Check nothing. A run that is already active is not refused, because another node of the
        same start may have set its status a moment ago."""

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        rank, total, host, port = read_node_variables(os.environ)
        spares = config.launch.spares
        count = total - spares
        procs = len(plan.places) // count
        # Before `run_node`: the fork server copies this environment when it starts.
        os.environ |= dict(plan.variables)
        node = NodeSpec(rank, count, procs, host, port, spares)
        return run_node(
            self, config, node, partial(agree_on_run, config, node, partial(create_run, config))
        )


def agree_on_run(
    config: Config,
    node: NodeSpec,
    open_run: Callable[[], Run],
    store: SealedStore,
    wait_for_key: Callable[[str], str],
) -> Run:
    """Return the run. Node 0 opens its folder; another node finds the same one, or makes its own at
    that path."""
    if node.rank == 0:
        run = open_run()
        store.set("run", str(run.folder))
        return run
    return adopt_run(Path(wait_for_key("run")), config)


def _describe_key(config: Config, total: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the step of a plan that says by what the nodes know each other."""
    if total == 1:
        return ()
    if read_key(env):
        return (f"know the other nodes by {KEY_VARIABLE}, which has to be the same on all",)
    folder = Path(config.run.dir).absolute()
    return (
        f"know the other nodes by a key that node 0 writes into a private file in {folder}, which "
        f"all have to see; otherwise set {KEY_VARIABLE}",
    )


def read_node_variables(env: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Return the number of this node, that of all nodes, and host and port of node 0; raise all
    faults of the variables at once."""
    faults = [
        Fault(f"launch=env, but {name} is not set", f"set it to {what}: {name}=…")
        for name, what in _REQUIRED_VARIABLES.items()
        if not env.get(name)
    ]
    numbers = {n: env.get(n, "") for n in ("MASTER_PORT", "WORLD_SIZE", "NODE_RANK")}
    faults += [
        Fault(f"{name}={text} is not a whole number", f"set it to {_REQUIRED_VARIABLES[name]}")
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
