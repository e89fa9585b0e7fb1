"""The values of a detected world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.errors import EchelonError, Fault
from echelon.world.device_fit import DeviceCountMismatch, find_device_count_mismatch


@dataclass(frozen=True)
class DeviceRule:
    """Which of the visible devices a local rank holds."""

    visible: int = 0
    per_replica: int = 1
    share: bool = False
    """Several local ranks on one device is what the user asked for."""
    own: bool = False
    """The scheduler shows each process its own devices only, so all count from 0."""

    def find_fault(self, local_rank: int) -> Fault | None:
        """Return why this local rank gets no devices of its own; None if it does."""
        procs = 1 if self.own else local_rank + 1  # the local ranks up to this one
        misfit = find_device_count_mismatch(self.visible, self.per_replica, procs, self.share)
        if misfit is None:
            return None
        first = self._get_first_device(local_rank)
        visible_text = f"{self.visible} CUDA device{'s are' if self.visible > 1 else ' is'} visible"
        if misfit is DeviceCountMismatch.TOO_FEW_DEVICES and not local_rank:
            return Fault(
                f"replica.devices={self.per_replica}, but {visible_text}",
                f"make {self.per_replica} visible (CUDA_VISIBLE_DEVICES), or set "
                f"replica.devices={self.visible}",
            )
        free_slots = self.visible // self.per_replica
        wanted = ", ".join(f"cuda:{first + i}" for i in range(self.per_replica))
        return Fault(
            f"local rank {local_rank} holds {wanted} ({self.per_replica} per process), "
            f"but {visible_text}: two processes would meet on one device",
            (f"start at most {free_slots} here" if free_slots else "set replica.devices lower")
            + self._describe_remedies(),
        )

    def get_device_names(self, local_rank: int) -> tuple[str, ...]:
        """Return the devices of a local rank. Past the last visible one they begin again, for ranks
        that share."""
        if not self.visible:
            stages = range(self.per_replica)
            return tuple(f"cpu stage {i}" for i in stages) if len(stages) > 1 else ("cpu",)
        first = self._get_first_device(local_rank)
        return tuple(f"cuda:{(first + i) % self.visible}" for i in range(self.per_replica))

    def _describe_remedies(self) -> str:
        more = "make more devices visible (CUDA_VISIBLE_DEVICES)"
        if self.per_replica > 1:
            return f", or {more}"
        return f", {more}, or set launch.share_devices=true where sharing is meant"

    def _get_first_device(self, local_rank: int) -> int:
        return 0 if self.own else local_rank * self.per_replica


@dataclass(frozen=True)
class World:
    """Who this process is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    master: str | None
    """`host:port` where the processes meet, or None for a single process."""
    source: str
    devices: tuple[str, ...]
    settled: bool = True
    """False: the variables do not say who shares a machine, so the local rank, the nodes and the
    devices are a guess until :meth:`renumber_by_hosts` is given the host of every rank."""
    rule: DeviceRule = DeviceRule()

    def renumber_by_hosts(self, hosts: Sequence[str]) -> World:
        """This world, given the host of every rank; nodes are numbered in the order of their first
        rank.

        Devices follow the new local rank. Raises an EchelonError when they are too few.
        """
        if len(hosts) != self.size:
            raise ValueError(f"{len(hosts)} hosts for a world of {self.size}")
        own_host = hosts[self.rank]
        local_rank = list(hosts[: self.rank]).count(own_host)
        nodes = list(dict.fromkeys(hosts))
        if fault := self.rule.find_fault(local_rank):
            raise EchelonError(fault)
        return replace(
            self,
            local_rank=local_rank,
            local_size=list(hosts).count(own_host),
            node_rank=nodes.index(own_host),
            nodes=len(nodes),
            devices=self.rule.get_device_names(local_rank),
            settled=True,
        )


@dataclass(frozen=True)
class DetectionReason:
    """One decided field and what decided it."""

    field: str
    value: str
    because: str


@dataclass(frozen=True)
class IgnoredVariable:
    """One launcher variable that was set and decided nothing."""

    variable: str
    value: str
    why: str


@dataclass(frozen=True)
class Detection:
    """A world with the reasons for it."""

    world: World
    reasons: tuple[DetectionReason, ...]
    ignored: tuple[IgnoredVariable, ...]
