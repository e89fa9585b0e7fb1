"""What a launch will do, before it does: who runs where, and what is started. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.world import detect

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Place:
    """Where one rank will be."""

    rank: int
    host: str
    local_rank: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    launcher: str
    places: tuple[Place, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set for every rank, beside its RANK, LOCAL_RANK and WORLD_SIZE."""
    steps: tuple[str, ...] = ()
    """What happens, in order."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def show(self, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.to_dict(), indent=2))
            return
        from rich.console import Console

        Console().print(self.render())

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        table = Table(
            title=f"launch={self.launcher}", title_justify="left", box=None, padding=(0, 2, 0, 0)
        )
        for column in ("rank", "host", "local rank", "devices"):
            table.add_column(column, justify="left")
        for place in self.places:
            row = (str(place.rank), place.host, str(place.local_rank), " ".join(place.devices))
            table.add_row(*row)
        settings = [f"  {key}={value}" for key, value in self.variables.items()]
        numbered = [f"{i}. {step}" for i, step in enumerate(self.steps, 1)]
        return Group(table, "", *(["variables:", *settings, ""] if settings else []), *numbered)


def make_plan(config: Config, env: Mapping[str, str], host: str, visible: int) -> Plan:
    """inline is this one process of whatever world it is in; local is one process per device
    unless told otherwise."""
    if config.launch.kind == "inline":
        return _inline_plan(config, env, host, visible)
    procs = process_count(config, visible)
    devices = [(f"cuda:{r % visible}",) if visible else ("cpu",) for r in range(procs)]
    threads = config.launch.threads or (1 if procs > 1 else None)
    variables = (
        {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in env else {}
    )
    return Plan(
        "local",
        tuple(Place(r, host, r, d) for r, d in enumerate(devices)),
        variables,
        (
            "import torch once",
            f"fork {procs} worker{'s' * (procs > 1)} under torchrun's elastic agent, "
            "on a loopback port",
            _on_failure(config.launch.max_restarts),
        ),
    )


def _on_failure(max_restarts: int) -> str:
    if not max_restarts:
        return "on a failure end them all and say which rank failed first"
    return f"on a failure start them again from the newest snapshot, {max_restarts} times at most"


def _inline_plan(config: Config, env: Mapping[str, str], host: str, visible: int) -> Plan:
    world = detect(
        env,
        rank=config.rank,
        world_size=config.world_size,
        master=config.master,
        visible=visible,
        share_devices=config.launch.share_devices,
    ).world
    here = Place(world.rank, host, world.local_rank, world.devices)
    if world.size == 1:
        return Plan("inline", (here,), steps=("train in this process",))
    steps = (
        f"meet the other {world.size - 1} processes at {world.master}",
        f"train in this process as rank {world.rank} of {world.size}",
    )
    return Plan("inline", (here,), steps=steps)


def process_count(config: Config, visible: int) -> int:
    procs = config.launch.procs or max(1, visible)
    if visible and procs > visible and not config.launch.share_devices:
        raise EchelonError(
            Fault(
                f"launch.procs={procs}, but {visible} devices are visible, so that two processes "
                "would share one",
                f"set launch.procs={visible}, or allow it with launch.share_devices=true",
            )
        )
    return procs
