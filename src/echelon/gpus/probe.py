"""Looking: from NVML and /proc to a snapshot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from echelon.gpus import nvml
from echelon.gpus.nvml import Nvml, NvmlDevice, NvmlError, NvmlProcess
from echelon.gpus.orphans import RunStatusCache
from echelon.gpus.processes import ProcessInfo, read_process_info, read_start_ticks
from echelon.gpus.state import Gpu, GpuNode, GpuProcess, MigSlice, is_idle

NO_GPU_REASONS = {
    nvml.NO_LIBRARY: "there is no NVIDIA driver (libnvidia-ml.so.1 is not found)",
    nvml.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (try `nvidia-smi`, or reboot)",
    nvml.NO_PERMISSION: "the NVIDIA driver gives no permission (may you read /dev/nvidiactl?)",
    nvml.VERSION_MISMATCH: "the NVIDIA driver was changed under a running system (reboot)",
}
GPU_FAULTS = {
    nvml.LOST: "lost: reboot or reset",
    nvml.RESET_REQUIRED: "needs a reset: nvidia-smi --gpu-reset",
    nvml.NO_PERMISSION: "no permission",
}


class StaticGpuInfo(NamedTuple):
    """What stays as it is; asked once."""

    device: NvmlDevice
    uuid: str | None
    name: str | None
    power_limit_w: float | None


class GpuProbe:
    """Looks again and again at this machine, and asks what cannot change only once."""

    def __init__(self) -> None:
        self._host = os.uname().nodename.partition(".")[0]
        self._nvml: Nvml | None = None
        self._driver: str | None = None
        self._cuda: str | None = None
        self._fixed: dict[int, StaticGpuInfo] = {}
        self._facts: dict[int, ProcessInfo | None] = {}
        self._before: dict[int, ProcessInfo | None] = {}
        """Of the last look, so that nothing is kept of processes that have ended."""
        self._runs = RunStatusCache()

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def read_node(self, indices: Sequence[int] = ()) -> GpuNode:
        """Every GPU, or only these; one that is not there is left out."""
        try:
            library = self._open_library()
            count = library.count_devices()
        except NvmlError as error:
            self.close()
            return GpuNode(self._host, NO_GPU_REASONS.get(error.code, str(error)))
        self._before, self._facts = self._facts, {}
        fault = None if count else "the NVIDIA driver is there, but no GPU"
        wanted = [index for index in range(count) if not indices or index in indices]
        gpus = tuple(self._read_gpu(library, index) for index in wanted)
        return GpuNode(self._host, fault, self._driver, self._cuda, gpus)

    def _open_library(self) -> Nvml:
        if self._nvml is None:
            self._nvml = Nvml()
            self._driver, self._cuda = (
                self._nvml.read_driver_version(),
                self._nvml.read_cuda_version(),
            )
            self._fixed.clear()
        return self._nvml

    # --- one GPU ---

    def _read_gpu(self, library: Nvml, index: int) -> Gpu:
        fixed = self._fixed.get(index)
        try:
            if fixed is None:
                fixed = self._fixed[index] = _read_static_info(library.open_device(index))
            return self._measure_gpu(index, fixed)
        except NvmlError as error:
            self._fixed.pop(index, None)  # one that comes back has another handle
            fault = GPU_FAULTS.get(error.code, str(error))
            if fixed is None:
                return Gpu(index, fault=fault)
            return Gpu(index, fixed.uuid, fixed.name, fault=fault)

    def _measure_gpu(self, index: int, fixed: StaticGpuInfo) -> Gpu:
        device = fixed.device
        use, memory, cut = device.read_use_percent(), device.read_memory(), device.is_mig_enabled()
        parts = enumerate(device.iter_slices()) if cut else ()
        slices = tuple(self._read_slice(i, part) for i, part in parts)
        processes = () if cut else self._list_processes(device)
        return Gpu(
            index,
            fixed.uuid,
            fixed.name,
            use_percent=use,
            memory_used_bytes=memory and memory.used_bytes,
            memory_total_bytes=memory and memory.total_bytes,
            temperature_c=device.read_temperature_c(),
            power_w=device.read_power_w(),
            power_limit_w=fixed.power_limit_w,
            fan_percent=device.read_fan_percent(),
            idle=not cut and is_idle(_count_if_known(processes), memory, use),
            mig=cut,
            slices=slices,
            processes=processes or (),
            processes_told=processes is not None,
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
            is_idle(_count_if_known(processes), memory, None),
        )

    # --- its processes ---

    def _list_processes(self, device: NvmlDevice) -> tuple[GpuProcess, ...] | None:
        listed = device.list_processes()
        if listed is None:
            return None
        if any(self._get_process_info(used.pid) is None for used in listed):
            # Gone a moment ago, or of another namespace: only the latter is listed again.
            again = {used.pid for used in device.list_processes() or []}
            listed = [used for used in listed if used.pid in again]
        seen = [self._describe_process(used) for used in listed]
        return tuple(sorted(seen, key=lambda p: (p.pid is None, p.pid)))

    def _describe_process(self, used: NvmlProcess) -> GpuProcess:
        known = self._get_process_info(used.pid)
        if known is None:
            return GpuProcess(None, memory_bytes=used.memory_bytes)
        folder = known.run_folder
        return GpuProcess(
            used.pid,
            known.user,
            used.memory_bytes,
            known.compute_age_s(),
            known.command,
            known.job,
            folder.rpartition("/")[2] if folder else None,
            folder,
            orphan=folder is not None and self._runs.is_run_over(folder),
        )

    def _get_process_info(self, pid: int) -> ProcessInfo | None:
        if pid not in self._facts:
            known = self._before.get(pid)
            same = (
                known is not None
                and known.is_up_to_date()
                and read_start_ticks(pid) == known.start_ticks
            )
            self._facts[pid] = known if same else read_process_info(pid)
        return self._facts[pid]


def _read_static_info(device: NvmlDevice) -> StaticGpuInfo:
    return StaticGpuInfo(
        device, device.read_uuid(), device.read_name(), device.read_power_limit_w()
    )


def _count_if_known(found: tuple[GpuProcess, ...] | None) -> int | None:
    return None if found is None else len(found)
