"""What a launch will do, before it does: who runs where, and what is started. Pure: the same
configuration gives the same text, and no GPU, Slurm or network is asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.utils.text import join_names
from echelon.world import DeviceRule

_RANK_BY_RANK = 64
"""A larger world is shown node by node."""


class Here(NamedTuple):
    """What a plan knows of the machine it is made on."""

    env: Mapping[str, str]
    host: str
    visible: int


@dataclass(frozen=True)
class Node:
    """One machine of the world."""

    rank: int = 0
    count: int = 1
    procs: int = 1
    host: str = "127.0.0.1"
    """Where node 0 is."""
    port: int = 0
    """0: one that the system chooses."""


class Place(NamedTuple):
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
    commands: tuple[tuple[str, ...], ...] = ()
    """What is executed, word by word."""
    script: str = ""
    """The batch script."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"places": [place._asdict() for place in self.places]}

    def show(self, as_json: bool) -> None:
        print(json.dumps(self.to_dict(), indent=2) if as_json else "\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        yield f"launch={self.launcher}{self._shape()}"
        yield from columns([("rank", "host", "local rank", "devices"), *self._rows()])
        if self.variables:
            yield from ("", "variables:")
            yield from (f"  {key}={value}" for key, value in self.variables.items())
        yield ""
        yield from (f"{i}. {step}" for i, step in enumerate(self.steps, 1))
        if self.script:
            yield from ("", "script:", *(f"  {line}" for line in self.script.splitlines()))

    def _shape(self) -> str:
        each, count = len(self.places[0].devices), len(self.places)
        kind = "stages" if self.places[0].devices[0].startswith("cpu") else "devices"
        return f": {count} process{'es' * (count > 1)} × {each} {kind}" if each > 1 else ""

    def _rows(self) -> Iterator[tuple[str, ...]]:
        if len(self.places) <= _RANK_BY_RANK:
            for place in self.places:
                row = (
                    str(place.rank),
                    place.host,
                    str(place.local_rank),
                    join_names(place.devices),
                )
                yield row
            return
        for host, group in groupby(self.places, key=lambda place: place.host):
            places = list(group)
            devices = [device for place in places for device in place.devices]
            yield (
                _span(places[0].rank, places[-1].rank),
                host,
                _span(places[0].local_rank, places[-1].local_rank),
                devices[0] if devices[0] == devices[-1] else f"{devices[0]} … {devices[-1]}",
            )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def places(
    hosts: Sequence[str], procs: Sequence[int], gpus: int, each: int = 1
) -> tuple[Place, ...]:
    """Ranks fill node by node; with no GPU, a rank is on its node's CPU."""
    found: list[Place] = []
    rule = DeviceRule(gpus, each)
    for host, count in zip(hosts, procs, strict=True):
        for local_rank in range(count):
            found.append(Place(len(found), host, local_rank, rule.names(local_rank)))
    return tuple(found)


def left_idle(config: Config, procs: int, visible: int) -> tuple[str, ...]:
    """The step that says so; of replicas of one device, the table says enough."""
    each = config.replica.devices
    left = visible - procs * each
    given = f"launch.procs={procs} × replica.devices={each}"
    return (f"leave {left} of {visible} devices idle: {given}",) if each > 1 and left > 0 else ()


def on_failure(config: Config) -> str:
    if not config.launch.max_restarts:
        return "on a failure end them all and say which rank failed first"
    times = config.launch.max_restarts
    what = "anew" if config.program else "from the newest snapshot"
    return f"on a failure start them again {what}, {times} times at most"


def what_runs(config: Config) -> str:
    if config.program:
        return shlex.join(config.program)
    shared = ", one model shared out between all ranks (fsdp)"
    sharded = config.replica.kind == "fsdp"
    return f"experiment {config.experiment['entry']}{shared * sharded}"


def process_count(config: Config, visible: int) -> int:
    each = config.replica.devices
    if fault := replica_fault(visible, each, config.launch.procs):
        raise EchelonError(fault)
    procs = config.launch.procs or processes_for(visible, each)
    if visible and procs > visible and not config.launch.share_devices:
        raise EchelonError(
            Fault(
                f"launch.procs={procs}, but {visible} devices are visible, so that two processes "
                "would share one",
                f"set launch.procs={visible}, or allow it with launch.share_devices=true",
            )
        )
    return procs


def processes_for(visible: int, each: int) -> int:
    """One for every `each` devices; one where there is none."""
    return max(1, visible // each)


def replica_fault(visible: int, each: int, procs: int | None, where: str = "") -> Fault | None:
    """Why replicas of several devices do not fit here. Devices may be left over where the number of
    processes was given: then it is meant."""
    if not visible or each == 1:
        return None
    room, left = divmod(visible, each)
    seen = f"{visible} device{'s are' if visible > 1 else ' is'} visible{where}"
    if not room:
        return Fault(
            f"replica.devices={each}, but {seen}",
            f"make {each} visible (CUDA_VISIBLE_DEVICES), or set replica.devices={visible}",
        )
    if procs is not None and procs > room:
        return Fault(
            f"launch.procs={procs} with replica.devices={each} take {procs * each} devices, but "
            + seen,
            f"set launch.procs={room}, or make more devices visible (CUDA_VISIBLE_DEVICES)",
        )
    if procs is None and left:
        return Fault(
            f"{visible} visible devices{where} do not divide by replica.devices={each}: {room} "
            f"replica{'s' * (room > 1)} would use {room * each}",
            f"set CUDA_VISIBLE_DEVICES to {room * each} of them, or launch.procs={room} to leave "
            f"{left} idle",
        )
    return None
