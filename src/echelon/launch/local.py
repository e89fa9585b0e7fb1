"""launch=local: the processes of this machine."""

from __future__ import annotations

import os

from echelon import runs
from echelon.config.schema import Config
from echelon.launch.node import serve, variables
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


def plan(config: Config, here: Here) -> Plan:
    procs = process_count(config, here.visible)
    return Plan(
        "local",
        places([here.host], [procs], here.visible, config.replica.devices),
        variables(config, procs, here.env),
        (
            "import torch once",
            f"fork {procs} worker{'s' * (procs > 1)} under torchrun's elastic agent, "
            f"on a loopback port: {what_runs(config)}",
            *left_idle(config, procs, here.visible),
            on_failure(config),
        ),
    )


def carry_out(config: Config, plan: Plan) -> int:
    os.environ |= dict(plan.variables)
    run = runs.create(config)
    return serve(config, Node(procs=len(plan.places)), lambda store, ask: run)
