"""Looking: from NVML and /proc to a snapshot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from echelon.gpus import nvml
from echelon.gpus.ended import Runs
from echelon.gpus.nvml import Device, Nvml, NvmlError, Used
from echelon.gpus.processes import Facts, born, facts
from echelon.gpus.snapshot import Gpu, Node, Process, Slice, is_idle

NO_GPU = {
    nvml.NO_LIBRARY: "there is no NVIDIA driver (libnvidia-ml.so.1 is not found)",
    nvml.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded (try `nvidia-smi`, or reboot)",
    nvml.NO_PERMISSION: "the NVIDIA driver gives no permission (may you read /dev/nvidiactl?)",
    nvml.VERSION_MISMATCH: "the NVIDIA driver was changed under a running system (reboot)",
}
FAULTS = {
    nvml.LOST: "lost: reboot or reset",
    nvml.RESET_REQUIRED: "needs a reset: nvidia-smi --gpu-reset",
    nvml.NO_PERMISSION: "no permission",
}


class Fixed(NamedTuple):
    """What stays as it is; asked once."""

    device: Device
    uuid: str | None
    name: str | None
    power_limit_w: float | None


class Machine:
    """Looks again and again at this machine, and asks what cannot change only once."""

    def __init__(self) -> None:
        self._host = os.uname().nodename.partition(".")[0]
        self._nvml: Nvml | None = None
        self._driver: str | None = None
        self._cuda: str | None = None
        self._fixed: dict[int, Fixed] = {}
        self._facts: dict[int, Facts | None] = {}
        self._before: dict[int, Facts | None] = {}
        """Of the last look, so that nothing is kept of processes that have ended."""
        self._runs = Runs()

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def look(self, only: Sequence[int] = ()) -> Node:
        """Every GPU, or only these; one that is not there is left out."""
        try:
            opened = self._open()
            count = opened.count()
        except NvmlError as error:
            self.close()
            return Node(self._host, NO_GPU.get(error.code, str(error)))
        self._before, self._facts = self._facts, {}
        fault = None if count else "the NVIDIA driver is there, but no GPU"
        wanted = [index for index in range(count) if not only or index in only]
        gpus = tuple(self._gpu(opened, index) for index in wanted)
        return Node(self._host, fault, self._driver, self._cuda, gpus)

    def _open(self) -> Nvml:
        if self._nvml is None:
            self._nvml = Nvml()
            self._driver, self._cuda = self._nvml.driver(), self._nvml.cuda()
            self._fixed.clear()
        return self._nvml

    # --- one GPU ---

    def _gpu(self, opened: Nvml, index: int) -> Gpu:
        fixed = self._fixed.get(index)
        try:
            if fixed is None:
                fixed = self._fixed[index] = _fixed(opened.device(index))
            return self._seen(index, fixed)
        except NvmlError as error:
            self._fixed.pop(index, None)  # one that comes back has another handle
            fault = FAULTS.get(error.code, str(error))
            if fixed is None:
                return Gpu(index, fault=fault)
            return Gpu(index, fixed.uuid, fixed.name, fault=fault)

    def _seen(self, index: int, fixed: Fixed) -> Gpu:
        device = fixed.device
        use, memory, cut = device.use_percent(), device.memory(), device.is_cut_up()
        parts = enumerate(device.slices()) if cut else ()
        slices = tuple(self._slice(i, part) for i, part in parts)
        processes = () if cut else self._processes(device)
        return Gpu(
            index,
            fixed.uuid,
            fixed.name,
            use_percent=use,
            memory_used_bytes=memory and memory.used,
            memory_total_bytes=memory and memory.total,
            temperature_c=device.temperature_c(),
            power_w=device.power_w(),
            power_limit_w=fixed.power_limit_w,
            fan_percent=device.fan_percent(),
            idle=not cut and is_idle(_length(processes), memory, use),
            mig=cut,
            slices=slices,
            processes=processes or (),
            processes_told=processes is not None,
        )

    def _slice(self, index: int, device: Device) -> Slice:
        memory, processes = device.memory(), self._processes(device)
        return Slice(
            index,
            device.uuid(),
            device.name(),
            memory and memory.used,
            memory and memory.total,
            processes or (),
            is_idle(_length(processes), memory, None),
        )

    # --- its processes ---

    def _processes(self, device: Device) -> tuple[Process, ...] | None:
        listed = device.processes()
        if listed is None:
            return None
        if any(self._known(used.pid) is None for used in listed):
            # Gone a moment ago, or of another namespace: only the latter is listed again.
            again = {used.pid for used in device.processes() or []}
            listed = [used for used in listed if used.pid in again]
        seen = [self._process(used) for used in listed]
        return tuple(sorted(seen, key=lambda p: (p.pid is None, p.pid)))

    def _process(self, used: Used) -> Process:
        known = self._known(used.pid)
        if known is None:
            return Process(None, memory_bytes=used.memory)
        folder = known.run_folder
        return Process(
            used.pid,
            known.user,
            used.memory,
            known.age_s(),
            known.command,
            known.job,
            folder.rpartition("/")[2] if folder else None,
            folder,
            orphan=folder is not None and self._runs.is_over(folder),
        )

    def _known(self, pid: int) -> Facts | None:
        if pid not in self._facts:
            known = self._before.get(pid)
            same = known is not None and known.is_settled() and born(pid) == known.born
            self._facts[pid] = known if same else facts(pid)
        return self._facts[pid]


def _fixed(device: Device) -> Fixed:
    return Fixed(device, device.uuid(), device.name(), device.power_limit_w())


def _length(found: tuple[Process, ...] | None) -> int | None:
    return None if found is None else len(found)
