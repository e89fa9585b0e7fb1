"""Reads the GPUs of this machine and the processes on them, from NVML and /proc.

``GpuProbe.read_node`` returns a ``GpuNode``: plain values, the same as of other machines.
``print_reports`` sends them as messages; it is what ``remote.py`` starts on other machines.

The text of this file is sent to those machines, which may not have Echelon and whose Python may be
as old as 3.9. The values are named tuples because importing dataclasses takes longer than reading
the GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from echelon.gpus import nvml
from echelon.gpus.nvml import GpuMemory, Nvml, NvmlDevice, NvmlError, NvmlProcess
from echelon.gpus.processes import (
    ProcessInfo,
    RunStatusCache,
    read_process_info,
    read_start_ticks,
)
from echelon.hosts.message_protocol import send_message

GPUS_JSON_VERSION = 1
"""The version of the JSON. A new field does not raise it; a field that is removed or changes its
meaning does."""

NO_GPU_REASONS = {
    nvml.NO_LIBRARY: "there is no NVIDIA driver (libnvidia-ml.so.1 is not found)",
    nvml.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (try `nvidia-smi`, or reboot)",
    nvml.NO_PERMISSION: "the NVIDIA driver denies access (may you read /dev/nvidiactl?)",
    nvml.VERSION_MISMATCH: "the NVIDIA driver was changed under a running system (reboot)",
}
"""Why a machine has no GPU, by the return code of NVML."""
GPU_FAULTS = {
    nvml.LOST: "lost: reboot or reset",
    nvml.RESET_REQUIRED: "needs a reset: nvidia-smi --gpu-reset",
    nvml.NO_PERMISSION: "no permission",
}
"""Why one GPU cannot be read, by the return code of NVML."""

_MIN_CONTEXT_BYTES = 256 << 20
"""A CUDA context takes more than this. A device with less memory in use is therefore idle, even
where the processes of other containers are not listed."""
_RESERVED_SHARE = 0.02
"""How much of the memory a driver may reserve, where it counts that as used."""
_NOISE_PERCENT = 5
"""A utilization below this may come from reading the device."""


# --- what is read: named tuples whose fields are the keys of `echelon gpus --json` ---


class GpuProcess(NamedTuple):
    """A process on a GPU. Fields that cannot be known from here are None."""

    pid: int | None
    """None for a process outside of this container."""
    user: str | None = None
    memory_bytes: int | None = None
    age_s: float | None = None
    command: str | None = None
    job: str | None = None
    """The ID of its Slurm job."""
    run: str | None = None
    """The name of its Echelon run."""
    run_folder: str | None = None
    orphan: bool = False
    """Whether its run is over."""


class MigSlice(NamedTuple):
    """A slice of a GPU that MIG has divided."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    uuid: str | None
    name: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    processes: tuple[GpuProcess, ...]
    idle: bool


class Gpu(NamedTuple):
    """A GPU. Values that it does not report are None."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    uuid: str | None = None
    name: str | None = None
    fault: str | None = None
    """Why it cannot be read; then nothing below is known."""
    use_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    fan_percent: int | None = None
    idle: bool = False
    """Whether a training could have it; False for a GPU in MIG mode, whose slices count."""
    mig: bool = False
    slices: tuple[MigSlice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    """Empty in MIG mode: the slices have the processes."""
    has_process_list: bool = True
    """Whether the driver lists processes to this user."""

    def list_all_processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes of the GPU and of its slices."""
        return self.processes + tuple(p for part in self.slices for p in part.processes)


class GpuNode(NamedTuple):
    """A machine and its GPUs."""

    host: str
    fault: str | None = None
    """Why there is no GPU to show, or why the machine does not answer any more."""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    stale_s: float | None = None
    """The age of these values if the machine does not answer any more."""


def is_idle(process_count: int | None, memory: GpuMemory | None, use_percent: int | None) -> bool:
    """Return whether nobody uses a device.

    Used memory counts as use even without a listed process: it may belong to another container.
    A device that reports neither its processes nor its memory is not idle.
    """
    if process_count or (use_percent or 0) >= _NOISE_PERCENT:
        return False
    if memory is None:
        return process_count is not None
    reserved_bytes = 0 if memory.excludes_reserved else int(_RESERVED_SHARE * memory.total_bytes)
    return memory.used_bytes < _MIN_CONTEXT_BYTES + reserved_bytes


# --- reading ---


class StaticGpuInfo(NamedTuple):
    """What does not change about a GPU; it is read once."""

    device: NvmlDevice
    uuid: str | None
    name: str | None
    power_limit_w: float | None


class GpuProbe:
    """Reads this machine repeatedly. NVML stays open, and what cannot change is read once."""

    def __init__(self) -> None:
        self._host = os.uname().nodename.partition(".")[0]
        self._nvml: Nvml | None = None
        self._driver: str | None = None
        self._cuda: str | None = None
        self._static_info: dict[int, StaticGpuInfo] = {}
        # Two generations by PID, so that processes that have ended are forgotten.
        self._process_info: dict[int, ProcessInfo | None] = {}
        self._previous_info: dict[int, ProcessInfo | None] = {}
        self._run_statuses = RunStatusCache()

    def close(self) -> None:
        """Release NVML; the next reading opens it again."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def read_node(self, indices: Sequence[int] = ()) -> GpuNode:
        """Return all GPUs, or those with these indices; indices that do not exist are left out.

        A machine without a driver and a GPU that is lost are not exceptions: the node or the GPU
        has a ``fault``.
        """
        try:
            library = self._open_library()
            count = library.count_devices()
        except NvmlError as error:
            self.close()
            return GpuNode(self._host, NO_GPU_REASONS.get(error.code, str(error)))
        self._previous_info, self._process_info = self._process_info, {}
        fault = None if count else "the NVIDIA driver is there, but no GPU"
        wanted = [index for index in range(count) if not indices or index in indices]
        gpus = tuple(self._read_gpu(library, index) for index in wanted)
        return GpuNode(self._host, fault, self._driver, self._cuda, gpus)

    def _open_library(self) -> Nvml:
        if self._nvml is None:
            self._nvml = Nvml()
            self._driver = self._nvml.read_driver_version()
            self._cuda = self._nvml.read_cuda_version()
            self._static_info.clear()
        return self._nvml

    # --- one GPU ---

    def _read_gpu(self, library: Nvml, index: int) -> Gpu:
        info = self._static_info.get(index)
        try:
            if info is None:
                info = self._static_info[index] = _read_static_info(library.open_device(index))
            return self._measure_gpu(index, info)
        except NvmlError as error:
            self._static_info.pop(index, None)  # a GPU that reappears has another handle
            fault = GPU_FAULTS.get(error.code, str(error))
            if info is None:
                return Gpu(index, fault=fault)
            return Gpu(index, info.uuid, info.name, fault=fault)

    def _measure_gpu(self, index: int, info: StaticGpuInfo) -> Gpu:
        device = info.device
        use_percent, memory, is_mig = (
            device.read_use_percent(),
            device.read_memory(),
            device.is_mig_enabled(),
        )
        slices = enumerate(device.iter_slices()) if is_mig else ()
        processes = () if is_mig else self._list_processes(device)
        return Gpu(
            index,
            info.uuid,
            info.name,
            use_percent=use_percent,
            memory_used_bytes=memory and memory.used_bytes,
            memory_total_bytes=memory and memory.total_bytes,
            temperature_c=device.read_temperature_c(),
            power_w=device.read_power_w(),
            power_limit_w=info.power_limit_w,
            fan_percent=device.read_fan_percent(),
            idle=not is_mig and is_idle(_count_listed_processes(processes), memory, use_percent),
            mig=is_mig,
            slices=tuple(self._read_slice(i, part) for i, part in slices),
            processes=processes or (),
            has_process_list=processes is not None,
        )

    def _read_slice(self, index: int, device: NvmlDevice) -> MigSlice:
        memory, processes = device.read_memory(), self._list_processes(device)
        return MigSlice(
            index,
            device.read_uuid(),
            device.read_name(),
            memory and memory.used_bytes,
            memory and memory.total_bytes,
            processes or (),
            is_idle(_count_listed_processes(processes), memory, None),
        )

    # --- its processes ---

    def _list_processes(self, device: NvmlDevice) -> tuple[GpuProcess, ...] | None:
        """Return the processes by PID, unknown ones last; None if the driver does not list them."""
        listed = device.list_processes()
        if listed is None:
            return None
        if any(self._get_process_info(process.pid) is None for process in listed):
            # Such a process has just ended, or is outside of this container. Only in the second
            # case the driver lists it again.
            again = {process.pid for process in device.list_processes() or []}
            listed = [process for process in listed if process.pid in again]
        described = [self._describe_process(process) for process in listed]
        return tuple(sorted(described, key=lambda p: (p.pid is None, p.pid)))

    def _describe_process(self, process: NvmlProcess) -> GpuProcess:
        info = self._get_process_info(process.pid)
        if info is None:
            return GpuProcess(None, memory_bytes=process.memory_bytes)
        folder = info.run_folder
        return GpuProcess(
            process.pid,
            info.user,
            process.memory_bytes,
            info.compute_age_s(),
            info.command,
            info.job,
            folder.rpartition("/")[2] if folder else None,
            folder,
            orphan=folder is not None and self._run_statuses.is_run_over(folder),
        )

    def _get_process_info(self, pid: int) -> ProcessInfo | None:
        """Return what is known about a process, from the previous reading if that still holds."""
        if pid not in self._process_info:
            known = self._previous_info.get(pid)
            is_same = (
                known is not None
                and known.is_up_to_date()
                and read_start_ticks(pid) == known.start_ticks
            )
            self._process_info[pid] = known if is_same else read_process_info(pid)
        return self._process_info[pid]


def _read_static_info(device: NvmlDevice) -> StaticGpuInfo:
    return StaticGpuInfo(
        device, device.read_uuid(), device.read_name(), device.read_power_limit_w()
    )


def _count_listed_processes(processes: tuple[GpuProcess, ...] | None) -> int | None:
    return None if processes is None else len(processes)


# --- JSON ---


def node_to_dict(node: GpuNode) -> dict[str, Any]:
    """Return a node as JSON-serializable values; ``node_from_dict`` is the inverse."""
    return node._asdict() | {"gpus": [_gpu_to_dict(gpu) for gpu in node.gpus]}


def _gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    slices = [
        part._asdict() | {"processes": _processes_to_dicts(part.processes)} for part in gpu.slices
    ]
    return gpu._asdict() | {"slices": slices, "processes": _processes_to_dicts(gpu.processes)}


def _processes_to_dicts(processes: tuple[GpuProcess, ...]) -> list[dict[str, Any]]:
    return [process._asdict() for process in processes]


def node_from_dict(fields: dict[str, Any]) -> GpuNode:
    """Return the node that ``node_to_dict`` converted; raise KeyError or TypeError on others."""
    return GpuNode(**fields | {"gpus": tuple(map(_gpu_from_dict, fields["gpus"]))})


def _gpu_from_dict(fields: dict[str, Any]) -> Gpu:
    slices = tuple(
        MigSlice(**part | {"processes": _processes_from_dicts(part["processes"])})
        for part in fields["slices"]
    )
    processes = _processes_from_dicts(fields["processes"])
    return Gpu(**fields | {"slices": slices, "processes": processes})


def _processes_from_dicts(dicts: list[dict[str, Any]]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(**fields) for fields in dicts)


def print_reports(interval_s: float) -> None:
    """Send a message per reading: one for an interval of 0, else until the reader is gone."""
    probe = GpuProbe()
    try:
        while True:
            send_message(node_to_dict(probe.read_node()))
            if not interval_s:
                return
            time.sleep(interval_s)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()  # Python would complain there about the closed standard output
