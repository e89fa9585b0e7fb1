"""launch=inline: this one process, of whatever world it is in."""

from __future__ import annotations

from echelon.config.schema import Config
from echelon.config.validate import check_cpu_support, check_fsdp_world_size
from echelon.errors import EchelonError
from echelon.launch.plan import LaunchMachine, LaunchPlan, RankPlacement
from echelon.world import detect


def plan(config: Config, machine: LaunchMachine) -> LaunchPlan:
    world = detect(
        machine.env,
        rank=config.rank,
        world_size=config.world_size,
        master=config.master,
        visible_devices=machine.visible_devices,
        devices_per_replica=config.replica.devices,
        share_devices=config.launch.share_devices,
    ).world
    fault = check_fsdp_world_size(config, world.size)
    faults = [
        *([fault] if fault else []),
        *([] if machine.visible_devices else check_cpu_support(config)),
    ]
    if faults:
        raise EchelonError(*faults)
    place = RankPlacement(world.rank, machine.host, world.local_rank, world.devices)
    if world.size == 1:
        return LaunchPlan("inline", (place,), steps=("train in this process",))
    steps = (
        f"meet the other {world.size - 1} processes at {world.master}",
        f"train in this process as rank {world.rank} of {world.size}",
    )
    return LaunchPlan("inline", (place,), steps=steps)
