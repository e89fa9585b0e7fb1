"""launch=local: the processes of this machine."""

from __future__ import annotations

import os

from echelon.config.schema import Config
from echelon.launch.node.service import make_thread_variables, run_node
from echelon.launch.plan import (
    LaunchMachine,
    LaunchPlan,
    NodeSpec,
    count_processes,
    describe_failure_policy,
    describe_idle_devices,
    describe_workload,
    place_ranks,
)
from echelon.runs import run_folder


def plan(config: Config, machine: LaunchMachine) -> LaunchPlan:
    procs = count_processes(config, machine.visible_devices)
    return LaunchPlan(
        "local",
        place_ranks([machine.host], [procs], machine.visible_devices, config.replica.devices),
        make_thread_variables(config, procs, machine.env),
        (
            "import torch once",
            f"fork {procs} worker{'s' * (procs > 1)} under torchrun's elastic agent, "
            f"on a loopback port: {describe_workload(config)}",
            *describe_idle_devices(config, procs, machine.visible_devices),
            describe_failure_policy(config),
        ),
    )


def start(config: Config, plan: LaunchPlan) -> int:
    os.environ |= dict(plan.variables)
    run = run_folder.create_run(config)
    return run_node(config, NodeSpec(procs=len(plan.places)), lambda store, ask: run)
