"""launch=inline: this one process, of whatever world it is in."""

from __future__ import annotations

from echelon.config.check import cpu_faults, replica_fault
from echelon.config.schema import Config
from echelon.errors import EchelonError
from echelon.launch.plan import Here, Place, Plan
from echelon.world import detect


def plan(config: Config, here: Here) -> Plan:
    world = detect(
        here.env,
        rank=config.rank,
        world_size=config.world_size,
        master=config.master,
        visible=here.visible,
        devices_per_replica=config.replica.devices,
        share_devices=config.launch.share_devices,
    ).world
    fault = replica_fault(config, world.size)
    faults = [*([fault] if fault else []), *([] if here.visible else cpu_faults(config))]
    if faults:
        raise EchelonError(*faults)
    place = Place(world.rank, here.host, world.local_rank, world.devices)
    if world.size == 1:
        return Plan("inline", (place,), steps=("train in this process",))
    steps = (
        f"meet the other {world.size - 1} processes at {world.master}",
        f"train in this process as rank {world.rank} of {world.size}",
    )
    return Plan("inline", (place,), steps=steps)
