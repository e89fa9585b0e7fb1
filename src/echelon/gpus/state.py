"""What was seen in one look: frozen values, the same from here and from another machine.

Named tuples, as everywhere on the way to a look: importing dataclasses takes longer than looking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from echelon.gpus.nvml import GpuMemory

GPUS_JSON_VERSION = 1
"""Of the JSON. A new field does not raise it; a field that goes or changes its meaning does."""

_MIN_CONTEXT_BYTES = 256 << 20
"""Bytes. Any process that computes takes more, so a device that has less in use is nobody's, also
where processes of other containers are not told."""
_RESERVED_SHARE = 0.02
"""What a driver may keep for itself, where it does not tell it apart."""
_NOISE_PERCENT = 5
"""So much may come of looking."""


class GpuProcess(NamedTuple):
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


class MigSlice(NamedTuple):
    """A part of a GPU that MIG has cut up."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    uuid: str | None
    name: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    processes: tuple[GpuProcess, ...]
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
    slices: tuple[MigSlice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    """Of a GPU that is cut up, none: its slices have them."""
    processes_told: bool = True
    """Whether the driver lists them to this user."""

    def list_all_processes(self) -> tuple[GpuProcess, ...]:
        return self.processes + tuple(p for part in self.slices for p in part.processes)


class GpuNode(NamedTuple):
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


def is_idle(processes: int | None, memory: GpuMemory | None, use: int | None) -> bool:
    """Memory that somebody holds and no process is shown for is somebody's all the same. A device
    that tells neither its processes nor its memory is not called idle."""
    if processes or (use or 0) >= _NOISE_PERCENT:
        return False
    if memory is None:
        return processes is not None
    reserved = 0 if memory.excludes_reserved else int(_RESERVED_SHARE * memory.total_bytes)
    return memory.used_bytes < _MIN_CONTEXT_BYTES + reserved


def node_to_dict(node: GpuNode) -> dict[str, Any]:
    return node._asdict() | {"gpus": [_gpu_to_dict(gpu) for gpu in node.gpus]}


def _gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    slices = [
        part._asdict() | {"processes": _processes_to_dicts(part.processes)} for part in gpu.slices
    ]
    return gpu._asdict() | {"slices": slices, "processes": _processes_to_dicts(gpu.processes)}


def _processes_to_dicts(processes: tuple[GpuProcess, ...]) -> list[dict[str, Any]]:
    return [process._asdict() for process in processes]


def node_from_dict(fields: dict[str, Any]) -> GpuNode:
    return GpuNode(**fields | {"gpus": tuple(map(_gpu_from_dict, fields["gpus"]))})


def _gpu_from_dict(fields: dict[str, Any]) -> Gpu:
    slices = tuple(
        MigSlice(**part | {"processes": _processes_from_dicts(part["processes"])})
        for part in fields["slices"]
    )
    return Gpu(
        **fields | {"slices": slices, "processes": _processes_from_dicts(fields["processes"])}
    )


def _processes_from_dicts(dicts: list[dict[str, Any]]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(**process) for process in dicts)
