"""What was seen in one look: frozen values, the same from here and from another machine.

Named tuples, as everywhere on the way to a look: importing dataclasses takes longer than looking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from echelon.gpus.nvml import Memory

VERSION = 1
"""Of the JSON. A new field does not raise it; a field that goes or changes its meaning does."""

_CONTEXT = 256 << 20
"""Bytes. Any process that computes takes more, so a device that has less in use is nobody's, also
where processes of other containers are not told."""
_RESERVED_PART = 0.02
"""What a driver may keep for itself, where it does not tell it apart."""
_NOISE_PERCENT = 5
"""So much may come of looking."""


class Process(NamedTuple):
    """A process on a GPU. None: it cannot be known from here."""

    pid: int | None
    user: str | None = None
    memory_bytes: int | None = None
    age_s: float | None = None
    command: str | None = None
    job: str | None = None
    """Slurm's number."""
    run: str | None = None
    """Echelon's name for it."""
    run_folder: str | None = None
    orphan: bool = False
    """Whether its run is over."""


class Slice(NamedTuple):
    """A part of a GPU that MIG has cut up."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    uuid: str | None
    name: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    processes: tuple[Process, ...]
    idle: bool


class Gpu(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    uuid: str | None = None
    name: str | None = None
    fault: str | None = None
    """Why nothing can be told of it."""
    use_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    fan_percent: int | None = None
    idle: bool = False
    mig: bool = False
    slices: tuple[Slice, ...] = ()
    processes: tuple[Process, ...] = ()
    """Of a GPU that is cut up, none: its slices have them."""
    processes_told: bool = True
    """Whether the driver lists them to this user."""

    def everyone(self) -> tuple[Process, ...]:
        return self.processes + tuple(p for part in self.slices for p in part.processes)


class Node(NamedTuple):
    """A machine."""

    host: str
    fault: str | None = None
    """Why there is no GPU to show."""
    driver: str | None = None
    cuda: str | None = None
    """The newest that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    stale_s: float | None = None
    """How old this is, of a machine that does not answer any more."""


def is_idle(processes: int | None, memory: Memory | None, use: int | None) -> bool:
    """Memory that somebody holds and no process is shown for is somebody's all the same. A device
    that tells neither its processes nor its memory is not called idle."""
    if processes or (use or 0) >= _NOISE_PERCENT:
        return False
    if memory is None:
        return processes is not None
    reserved = 0 if memory.exact else int(_RESERVED_PART * memory.total)
    return memory.used < _CONTEXT + reserved


def to_dict(node: Node) -> dict[str, Any]:
    return node._asdict() | {"gpus": [_gpu_to_dict(gpu) for gpu in node.gpus]}


def _gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    slices = [part._asdict() | {"processes": _dicts(part.processes)} for part in gpu.slices]
    return gpu._asdict() | {"slices": slices, "processes": _dicts(gpu.processes)}


def _dicts(processes: tuple[Process, ...]) -> list[dict[str, Any]]:
    return [process._asdict() for process in processes]


def from_dict(told: dict[str, Any]) -> Node:
    return Node(**told | {"gpus": tuple(map(_gpu_from_dict, told["gpus"]))})


def _gpu_from_dict(told: dict[str, Any]) -> Gpu:
    slices = tuple(
        Slice(**part | {"processes": _processes(part["processes"])}) for part in told["slices"]
    )
    return Gpu(**told | {"slices": slices, "processes": _processes(told["processes"])})


def _processes(told: list[dict[str, Any]]) -> tuple[Process, ...]:
    return tuple(Process(**process) for process in told)
