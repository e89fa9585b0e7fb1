"""What a launch will do, before it does: which rank runs where, and what is started.

Plans are pure: the same configuration gives the same plan, and no GPU, Slurm or network is asked.
So `--dry-run` can show them anywhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from echelon.config.schema import Config
from echelon.config.validate import find_replacement_obstacle
from echelon.errors import EchelonError
from echelon.utils.text import format_count, join_names
from echelon.world import DeviceRule
from echelon.world.device_fit import find_visible_fit_fault, get_default_process_count

_MAX_LISTED_RANKS = 64
"""A larger world is shown node by node."""


class LocalMachine(NamedTuple):
    """What a plan knows of the machine it is made on."""

    env: Mapping[str, str]
    host: str
    visible_devices: int


class NodeReport(NamedTuple):
    """What the leader tells the launcher about the nodes of a run, after each change."""

    nodes: list[int]
    """Those that go on."""
    left_nodes: list[int]
    """Those that have left on purpose."""
    missing: int
    """So many more are wanted."""
    returning: list[tuple[int, int]]
    """Those that are lost and would be taken back, each with the number of a new agent there."""
    master: str
    """HOST:PORT of the leader's store."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> NodeReport:
        """Return the report with the fields that `_asdict` made of it."""
        pairs = [(int(node), int(number)) for node, number in fields["returning"]]
        return cls(**{**fields, "returning": pairs})


ReportNodes: TypeAlias = Callable[[NodeReport], None]
"""Called on the leader."""


@dataclass(frozen=True)
class NodeSpec:
    """One machine of the world, and where it meets the others."""

    rank: int = 0
    node_count: int = 1
    procs: int = 1
    master_host: str = "127.0.0.1"
    """Where node 0 is."""
    master_port: int = 0
    """0: one that the system chooses."""
    spares: int = 0
    """Nodes beyond `node_count`, which run no ranks until one of those is lost."""
    is_added: bool = False
    """Whether it is of a further job, for a run that trains already."""

    @property
    def is_spare(self) -> bool:
        """Whether this node waits to take the place of another one."""
        return self.rank >= self.node_count


class RankPlacement(NamedTuple):
    """Where one rank will be."""

    rank: int
    host: str
    local_rank: int
    devices: tuple[str, ...]
    replica: int | None = None
    """The replica of a sharded model of which it has a shard."""
    shard: int | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """What will happen, as `--dry-run` prints it and `--dry-run --json` gives it."""

    launcher: str
    places: tuple[RankPlacement, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set for every rank, beside its RANK, LOCAL_RANK and WORLD_SIZE."""
    steps: tuple[str, ...] = ()
    """What happens, in order."""
    commands: tuple[tuple[str, ...], ...] = ()
    """What is executed, word by word."""
    script: str = ""
    """The batch script."""
    manifest: str = ""
    """The objects of Kubernetes, as YAML."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        places = [place._asdict() for place in self.places]
        return asdict(self) | {
            "places": [{k: v for k, v in place.items() if v is not None} for place in places]
        }

    def print_plan(self, as_json: bool) -> None:
        """Print the plan, as text or as JSON."""
        print(json.dumps(self.to_dict(), indent=2) if as_json else self.render_text())

    def render_text(self) -> str:
        """Return the plan as `--dry-run` prints it."""
        return "\n".join(self._render_lines())

    def _render_lines(self) -> Iterator[str]:
        yield f"launch={self.launcher}{self._render_shape()}"
        is_sharded = self.places[0].shard is not None
        head = ("rank", "host", "local rank", "devices", *("replica", "shard") * is_sharded)
        yield from render_columns([head, *self._render_rows()])
        if self.variables:
            yield from ("", "variables:")
            yield from (f"  {key}={value}" for key, value in self.variables.items())
        yield ""
        yield from (f"{i}. {step}" for i, step in enumerate(self.steps, 1))
        for title, text in (("script:", self.script), ("manifest:", self.manifest)):
            if text:
                yield from ("", title, *(f"  {line}" for line in text.splitlines()))

    def _render_shape(self) -> str:
        """Return how many processes on how many devices each, or in how many replicas of how many
        shards, where that is more than one."""
        shards = 1 + max(place.shard or 0 for place in self.places)
        replicas = len(self.places) // shards  # 0 where the plan has one rank of many
        if shards > 1 and replicas:
            return f": {format_count(replicas, 'replica')} × {shards} shards"
        each, count = len(self.places[0].devices), len(self.places)
        kind = "stages" if self.places[0].devices[0].startswith("cpu") else "devices"
        return f": {count} process{'es' * (count > 1)} × {each} {kind}" if each > 1 else ""

    def _render_rows(self) -> Iterator[tuple[str, ...]]:
        """A row per rank; in a large world one per node."""
        if len(self.places) <= _MAX_LISTED_RANKS:
            for place in self.places:
                row = (
                    str(place.rank),
                    place.host,
                    str(place.local_rank),
                    join_names(place.devices),
                    *_format_shards([place]),
                )
                yield row
            return
        for host, group in groupby(self.places, key=lambda place: place.host):
            places = list(group)
            devices = [device for place in places for device in place.devices]
            yield (
                _format_span(places[0].rank, places[-1].rank),
                host,
                _format_span(places[0].local_rank, places[-1].local_rank),
                devices[0] if devices[0] == devices[-1] else f"{devices[0]} … {devices[-1]}",
                *_format_shards(places),
            )


def _format_span(first: int, last: int) -> str:
    """`3`, or `4–7`."""
    return str(first) if first == last else f"{first}–{last}"


def _format_shards(places: Sequence[RankPlacement]) -> list[str]:
    """Return which shards of which replicas neighbouring ranks have; empty where they have none."""
    replicas = [place.replica for place in places if place.replica is not None]
    shards = [place.shard for place in places if place.shard is not None]
    if not shards:
        return []
    return [_format_span(min(n), max(n)) for n in (replicas, shards)]


def render_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines with the cells of each column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def place_ranks(
    hosts: Sequence[str], procs: Sequence[int], gpus: int, config: Config
) -> tuple[RankPlacement, ...]:
    """Return where each rank will be: ranks fill node by node; without GPUs they are on CPUs."""
    rule = DeviceRule(gpus, config.replica.devices)
    slots = [(host, n) for host, count in zip(hosts, procs, strict=True) for n in range(count)]
    return tuple(
        RankPlacement(
            rank,
            host,
            local_rank,
            rule.get_device_names(local_rank),
            *locate_shard(config, rank, len(slots)),
        )
        for rank, (host, local_rank) in enumerate(slots)
    )


def locate_shard(config: Config, rank: int, world_size: int) -> tuple[int, int] | tuple[()]:
    """Return the replica of which a rank has a shard, and which shard; empty where the model is not
    sharded."""
    shards = config.replica.count_shards(world_size)
    return () if config.program or shards == 1 else divmod(rank, shards)


def describe_idle_devices(config: Config, procs: int, visible_devices: int) -> tuple[str, ...]:
    """Return the step of a plan that leaves devices idle. With one device per replica the table
    shows enough."""
    devices_per_replica = config.replica.devices
    idle_devices = visible_devices - procs * devices_per_replica
    settings = f"launch.procs={procs} × replica.devices={devices_per_replica}"
    return (
        (f"leave {idle_devices} of {visible_devices} devices idle: {settings}",)
        if devices_per_replica > 1 and idle_devices > 0
        else ()
    )


def describe_failure_policy(config: Config, world_size: int) -> str:
    """Return the step of a plan that says what happens after a failure. Which backend the
    ranks use is known when they have joined."""
    first = ""
    if world_size > 1 and may_replace_ranks(config):
        first = "replace a rank that is lost while the others go on, unless they use NCCL; "
    if not config.launch.max_restarts:
        return f"{first}on a failure end them all and say which rank failed first"
    times = config.launch.max_restarts
    what = "anew" if config.program else "from the newest snapshot"
    return f"{first}on a failure start them again {what}, {times} times at most"


def may_replace_ranks(config: Config) -> bool:
    """Return whether lost ranks and nodes can be replaced, as far as the settings tell."""
    return not find_replacement_obstacle(config)


def describe_node_policy(config: Config, nodes: int, after: str = "") -> tuple[str, ...]:
    """Return the step of a plan that says what happens when a node is lost; `after` says what
    follows a run that ends by it."""
    launch = config.launch
    if nodes + launch.spares == 1:
        return ()
    lost = f"a node that dies, or is silent for {launch.silence_s:g} s"
    if not may_replace_ranks(config):
        return (f"{lost}, ends the run: its ranks cannot be replaced{after}",)
    count = launch.spares
    spare = f"is replaced by one of {count} spare{'s' * (count > 1)}" if count else "is left out"
    least = launch.min_nodes or 1
    rest = f"the others go on while a majority is left, and {least} node{'s' * (least > 1)}"
    return (f"{lost}, {spare}; {rest}; with NCCL it ends the run{after}",)


def describe_program_or_experiment(config: Config) -> str:
    """Return what the processes run: a program or an experiment."""
    if config.program:
        return shlex.join(config.program)
    entry, replica = config.experiment["entry"], config.replica
    if not replica.is_sharded:
        return f"experiment {entry}"
    whom = "all ranks" if replica.shards is None else f"{replica.shards} ranks each"
    return f"experiment {entry}, the model shared out between {whom} (fsdp)"


def count_local_processes(config: Config, visible_devices: int) -> int:
    """Return how many processes this machine gets: as set, else one for every replica's devices.

    Raises an :class:`EchelonError` where they do not fit onto the visible devices.
    """
    procs, devices_per_replica = config.launch.procs, config.replica.devices
    if fault := find_visible_fit_fault(
        visible_devices, devices_per_replica, procs, config.launch.share_devices
    ):
        raise EchelonError(fault)
    return procs or get_default_process_count(visible_devices, devices_per_replica)


def make_program_words(config: Config, nodes: int, gpus: int) -> list[str]:
    """Return the words of the program, with the flags appended by which it learns the world."""
    launch = config.launch
    words = list(config.program)
    if launch.nodes_flag:
        words += [launch.nodes_flag, str(nodes)]
    if launch.gpus_flag:
        words += [launch.gpus_flag, str(gpus)]
    return words


# --- the probes of a preflight ---


class ProbeCommand(NamedTuple):
    """A command that runs the probe of one node, or of many at once as srun does."""

    argv: Sequence[str]
    nodes: Sequence[int]
    first_input: bytes = b""
    """What it reads before the orders."""


class ProbeExit(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    """The last lines of what it printed, without messages."""


class ProbePlan(NamedTuple):
    """The nodes of a job and the commands that start their probes."""

    names: Sequence[str]
    """Of the nodes as they are configured; with Slurm only the probes know the real names."""
    procs: Sequence[int | None]
    """Processes on each node; None means one per device."""
    commands: Sequence[ProbeCommand]
    is_queued: bool = False
    """Whether the nodes are still to be allocated, so that the command waits in a queue."""


def plan_local_probe(probe: Sequence[str], procs: int | None) -> ProbePlan:
    """Return the plan of a launcher whose only node is this machine."""
    return ProbePlan(["this machine"], [procs], [ProbeCommand([*probe, "0"], [0])])
