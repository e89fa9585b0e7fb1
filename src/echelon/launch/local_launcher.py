"""launch=local: processes of this machine, under torchrun's elastic agent in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from echelon.config.schema import Config
from echelon.config.validate import check_cpu_support
from echelon.errors import Fault
from echelon.launch.containers.command import describe_container, pin_runtime, wrap_python
from echelon.launch.launcher import (
    Launcher,
    LaunchServices,
    require_no_writer,
    require_preflight,
    warn_of_other_users,
)
from echelon.launch.node.service import make_thread_variables, run_node
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    NodeSpec,
    ProbePlan,
    count_local_processes,
    describe_failure_policy,
    describe_idle_devices,
    describe_program_or_experiment,
    place_ranks,
    plan_local_probe,
)
from echelon.runs.create import create_run
from echelon.runs.submitted_run import take_submitted_run


class LocalLauncher(Launcher):
    """One node, this one. The agent is a part of the command that was typed, or with
    `launch.container` a process in the container."""

    name = "local"

    def complete_config(self, config: Config, dry_run: bool) -> Config:
        return pin_runtime(super().complete_config(config, dry_run))

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        procs = count_local_processes(config, machine.visible_devices)
        return LaunchPlan(
            self.name,
            place_ranks([machine.host], [procs], machine.visible_devices, config),
            make_thread_variables(config, procs, machine.env),
            (
                *describe_container(config),
                "import torch once",
                f"fork {procs} worker{'s' * (procs > 1)} under torchrun's elastic agent, "
                f"on a loopback port: {describe_program_or_experiment(config)}",
                *describe_idle_devices(config, procs, machine.visible_devices),
                describe_failure_policy(config, procs),
            ),
        )

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        """Also what a CPU cannot do: the machine that trains is this one."""
        on_cpu = not config.program and not machine.visible_devices
        faults = super().find_config_faults(config, plan, machine)
        return [*faults, *(check_cpu_support(config) if on_cpu else [])]

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        # The cheap check first: preflight may take a minute.
        require_no_writer(config)
        if config.launch.container is not None:
            from echelon.launch.containers.check import require_container_here

            require_container_here(config)
        require_preflight(config, services)
        warn_of_other_users(config, plan)

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        if config.program and config.mode == "wandb":
            # `wandb agent` starts trials itself; each of them becomes a launch of its own.
            return services.run_wandb_agent(config)
        os.environ |= dict(plan.variables)
        run = take_submitted_run(config, os.environ) or create_run(config)
        if config.launch.container is not None:
            from echelon.launch.containers.local_node import run_local_node

            return run_local_node(config, run, len(plan.places))
        node = NodeSpec(procs=len(plan.places))
        return run_node(self, config, node, lambda store, wait_for_key: run)

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        return plan_local_probe(wrap_python(config, probe), config.launch.procs)
