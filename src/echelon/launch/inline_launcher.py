"""launch=inline: train in this one process, whatever world it is part of.

Nothing is started. Alone the process is a world of one; under `torchrun`, `srun` or `mpirun`, or
with rank= and world_size=, it is one rank of a world that somebody else started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.config.schema import Config
from echelon.config.validate import check_cpu_support, find_size_faults
from echelon.errors import EchelonError, Fault
from echelon.launch.launcher import (
    Launcher,
    LaunchServices,
    require_no_writer,
    warn_of_other_users,
)
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    ProbePlan,
    RankPlacement,
    locate_shard,
    plan_local_probe,
)
from echelon.world import detect
from echelon.world.network_key import KEY_VARIABLE, read_key

_STEPS_ALONE = ("train in this process",)
"""What a process does that is a world of its own."""
_OPEN_NETWORK = (
    f"trust whoever reaches that address: {KEY_VARIABLE} is not set, and the processes have no key"
)


class InlineLauncher(Launcher):
    """The launcher of a process that is already where it trains."""

    name = "inline"
    applies_trial = False
    trains_in_process = True

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        """Return the plan of this rank alone; every other rank makes its own."""
        world = detect(
            machine.env,
            rank=config.rank,
            world_size=config.world_size,
            master=config.master,
            visible_devices=machine.visible_devices,
            devices_per_replica=config.replica.devices,
            share_devices=config.launch.share_devices,
        ).world
        faults = [
            *find_size_faults(config, world.size),
            *([] if machine.visible_devices else check_cpu_support(config)),
        ]
        if faults:
            raise EchelonError(*faults)
        where = locate_shard(config, world.rank, world.size)
        place = RankPlacement(world.rank, machine.host, world.local_rank, world.devices, *where)
        if world.size == 1:
            return LaunchPlan(self.name, (place,), steps=_STEPS_ALONE)
        steps = (
            f"meet the other {world.size - 1} process{'es' * (world.size > 2)} at {world.master}",
            f"train in this process as rank {world.rank} of {world.size}",
            "on a failure end, and leave restarts to whoever started the processes: lost ranks are "
            "not replaced",
            *([] if read_key(machine.env) else [_OPEN_NETWORK]),
        )
        return LaunchPlan(self.name, (place,), steps=steps)

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        """Check nothing. The plan has one place, so the size of the world cannot be read from it;
        `plan` has already checked what depends on that size."""
        return []

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        """Refuse a run that somebody else writes, before torch is imported, and warn of other
        users of the devices. In a larger world the writer may be rank 0 of this very run, so that
        is left to rank 0, which tells the others."""
        if plan.steps == _STEPS_ALONE:
            require_no_writer(config)
        warn_of_other_users(config, plan)

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        return services.train_in_process(config)

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        return plan_local_probe(probe, config.launch.procs)
