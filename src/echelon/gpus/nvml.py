"""Bindings for NVML, NVIDIA's management library, through ctypes.

The official Python binding takes longer to import than reading eight GPUs takes, and it supports
the process lists of one driver generation at a time. The few calls used here have kept their
signatures for ten years; where a call has several versions, the newest is tried first.

The text of this file is also sent to other machines (see ``remote.py``), so it imports nothing
outside the standard library and runs on Python 3.9.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
"""The shared library to load; tests replace it with a stand-in."""

# Return codes (nvmlReturn_t). Those named *_LIBRARY and *_FUNCTION are also used here for a library
# that cannot be loaded and for a function that an old driver does not have.
SUCCESS, NO_PERMISSION, INSUFFICIENT_SIZE = 0, 4, 7
DRIVER_NOT_LOADED, NO_LIBRARY, NO_FUNCTION = 9, 12, 13
LOST, RESET_REQUIRED, VERSION_MISMATCH = 15, 16, 18

_UNKNOWN_MEMORY = 0xFFFF_FFFF_FFFF_FFFF
"""What NVML reports as the memory of a process when it does not know it (for example on WSL)."""
_UNWRITTEN = b"\xa5"
"""Fills buffers before a call, so that the bytes that NVML wrote can be told from the rest."""
_MAX_PROCESSES = 1 << 15
"""More processes than this on one GPU are taken for a driver error, which ends the retries."""
_PROCESS_BYTES, _PROCESS_V1_BYTES = 24, 16
"""Size of an entry in NVML's process lists, in the current version and in the first one."""
_PROCESS_WIDE_BYTES = 32
"""Size of an entry in some drivers of 2023, which append a field without a new version number."""


class NvmlError(Exception):
    """A call of NVML failed; ``code`` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML error {code}")
        self.code = code


class NvmlProcess(NamedTuple):
    """A process on a device, as the driver lists it."""

    pid: int
    memory_bytes: int | None
    """None if the driver does not report it."""


class GpuMemory(NamedTuple):
    """The memory of a device."""

    used_bytes: int
    total_bytes: int
    excludes_reserved: bool
    """Whether ``used_bytes`` leaves out what the driver reserves for itself."""


class NvmlDevice(NamedTuple):
    """A GPU or a MIG slice of one.

    Each method asks the driver again. A value that the device does not report is None; only a
    device that is lost or needs a reset raises an NvmlError.
    """

    nvml: Nvml
    handle: c_void_p

    def read_name(self) -> str | None:
        """Return the product name, for example ``NVIDIA H200``."""
        return self.nvml.query_text("nvmlDeviceGetName", self.handle)

    def read_uuid(self) -> str | None:
        """Return the UUID as CUDA_VISIBLE_DEVICES takes it: ``GPU-…`` or ``MIG-…``."""
        return self.nvml.query_text("nvmlDeviceGetUUID", self.handle)

    def read_use_percent(self) -> int | None:
        """Return the share of the last sampling period in which a kernel ran."""
        rates = (c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        known = self.nvml.try_call("nvmlDeviceGetUtilizationRates", self.handle, byref(rates))
        return rates[0] if known else None

    def read_temperature_c(self) -> int | None:
        """Return the temperature of the GPU die."""
        return self.nvml.read_uint("nvmlDeviceGetTemperature", self.handle, c_uint(0))

    def read_power_w(self) -> float | None:
        """Return the power draw."""
        return _to_watts(self.nvml.read_uint("nvmlDeviceGetPowerUsage", self.handle))

    def read_energy_j(self) -> float | None:
        """Return the energy that was used since the driver was loaded."""
        energy_mj = c_ulonglong()
        known = self.nvml.try_call(
            "nvmlDeviceGetTotalEnergyConsumption", self.handle, byref(energy_mj)
        )
        return energy_mj.value / 1000 if known else None

    def read_power_limit_w(self) -> float | None:
        """Return the power limit that the driver enforces."""
        return _to_watts(self.nvml.read_uint("nvmlDeviceGetEnforcedPowerLimit", self.handle))

    def read_fan_percent(self) -> int | None:
        """Return the intended fan speed; None for GPUs without a fan."""
        return self.nvml.read_uint("nvmlDeviceGetFanSpeed", self.handle)

    def read_compute_capability(self) -> tuple[int, int] | None:
        """Return the compute capability, for example ``(9, 0)``."""
        major, minor = c_uint(), c_uint()
        name = "nvmlDeviceGetCudaComputeCapability"
        known = self.nvml.try_call(name, self.handle, byref(major), byref(minor))
        return (major.value, minor.value) if known else None

    def count_memory_errors(self) -> int:
        """Return the uncorrected ECC errors since the driver was loaded; 0 without ECC."""
        return self._read_ecc_errors() or 0

    def read_error_counts(self) -> dict[str, int]:
        """Return what the device counts of errors that nothing corrected, by a name for a person.

        Only what it reports is there: newer GPUs remap rows of their memory, older ones retire
        pages.
        """
        found: dict[str, int] = {}
        if (errors := self._read_ecc_errors()) is not None:
            found["uncorrected memory errors"] = errors
        rows = [c_uint() for _ in range(4)]  # corrected, uncorrected, is pending, has failed
        if self.nvml.try_call("nvmlDeviceGetRemappedRows", self.handle, *map(byref, rows)):
            found["rows remapped for uncorrected errors"] = rows[1].value
            found["pending row remappings"] = rows[2].value
            found["failed row remappings"] = rows[3].value
        pending = self.nvml.read_uint("nvmlDeviceGetRetiredPagesPendingStatus", self.handle)
        if pending is not None:
            found["pending page retirements"] = pending
        return found

    def _read_ecc_errors(self) -> int | None:
        errors, uncorrected, since_loaded = c_ulonglong(), c_uint(1), c_uint(0)
        name = "nvmlDeviceGetTotalEccErrors"
        known = self.nvml.try_call(name, self.handle, uncorrected, since_loaded, byref(errors))
        return errors.value if known else None

    def read_memory(self) -> GpuMemory | None:
        """Return used and total memory, from the newest call that the driver has."""
        newer = (c_ulonglong * 5)()  # nvmlMemory_v2_t: version, total, reserved, free, used
        newer[0] = ctypes.sizeof(newer) | 2 << 24  # as the macro NVML_STRUCT_VERSION computes it
        if self.nvml.try_call("nvmlDeviceGetMemoryInfo_v2", self.handle, byref(newer)):
            return GpuMemory(newer[4], newer[1], excludes_reserved=True)
        older = (c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        if self.nvml.try_call("nvmlDeviceGetMemoryInfo", self.handle, byref(older)):
            return GpuMemory(older[2], older[0], excludes_reserved=False)
        return None

    def list_processes(self) -> list[NvmlProcess] | None:
        """Return the processes with a compute or a graphics context.

        None means that the driver does not list processes to this user, as opposed to a device
        without any.
        """
        compute = self._list_by_newest_call("nvmlDeviceGetComputeRunningProcesses")
        graphics = self._list_by_newest_call("nvmlDeviceGetGraphicsRunningProcesses")
        if compute is None and graphics is None:
            return None
        # A process with both kinds of context is in both lists; its compute entry is kept.
        by_pid = {process.pid: process for process in [*(graphics or ()), *(compute or ())]}
        return list(by_pid.values())

    def _list_by_newest_call(self, name: str) -> list[NvmlProcess] | None:
        """Return what the newest version of a call lists; None if the driver has none of them."""
        for version, entry_bytes in (
            ("_v3", _PROCESS_BYTES),
            ("_v2", _PROCESS_BYTES),
            ("", _PROCESS_V1_BYTES),
        ):
            if (processes := self._list_by_call(name + version, entry_bytes)) is not None:
                return processes
        return None

    def _list_by_call(self, name: str, entry_bytes: int) -> list[NvmlProcess] | None:
        """Return what one version of a call lists, or None if it fails.

        NVML first reports how many entries there are. More processes may start before the next
        call, so the buffer has some spare entries and grows until the list fits.
        """
        capacity, code = 0, INSUFFICIENT_SIZE
        while code == INSUFFICIENT_SIZE and capacity < _MAX_PROCESSES:
            count = c_uint(capacity)
            buffer = ctypes.create_string_buffer(_UNWRITTEN * (_PROCESS_WIDE_BYTES * capacity + 1))
            code = self.nvml.call_unchecked(
                name, self.handle, byref(count), buffer if capacity else None
            )
            capacity = max(capacity, count.value) + 8
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return _unpack_processes(buffer.raw, count.value, entry_bytes) if code == SUCCESS else None

    def is_mig_enabled(self) -> bool:
        """Return whether MIG divides this GPU into slices now."""
        now, after_reset = c_uint(), c_uint()
        name = "nvmlDeviceGetMigMode"
        known = self.nvml.try_call(name, self.handle, byref(now), byref(after_reset))
        return known and bool(now.value)

    def iter_slices(self) -> Iterator[NvmlDevice]:
        """Yield the MIG slices that exist on this GPU."""
        max_slices = self.nvml.read_uint("nvmlDeviceGetMaxMigDeviceCount", self.handle) or 0
        for index in range(max_slices):
            mig_slice = NvmlDevice(self.nvml, c_void_p())
            name = "nvmlDeviceGetMigDeviceHandleByIndex"
            if self.nvml.try_call(name, self.handle, c_uint(index), byref(mig_slice.handle)):
                yield mig_slice


class Nvml:
    """The initialized library. Raises NvmlError if it cannot be loaded or initialized."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NvmlError(NO_LIBRARY) from None
        self._call_or_raise("nvmlInit_v2")

    def close(self) -> None:
        """Release the library; device handles are invalid afterwards."""
        self.call_unchecked("nvmlShutdown")

    def read_driver_version(self) -> str | None:
        """Return the version of the driver, for example ``550.54.15``."""
        return self.query_text("nvmlSystemGetDriverVersion")

    def read_cuda_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports, for example ``12.4``."""
        number = self.read_uint("nvmlSystemGetCudaDriverVersion_v2")
        number = number or self.read_uint("nvmlSystemGetCudaDriverVersion")
        return f"{number // 1000}.{number % 1000 // 10}" if number else None

    def count_devices(self) -> int:
        """Return the number of GPUs that the driver manages; MIG slices are not counted."""
        count = c_uint()
        self._call_or_raise("nvmlDeviceGetCount_v2", byref(count))
        return count.value

    def open_device(self, index: int) -> NvmlDevice:
        """Return the GPU with this index, in NVML's order (that of the PCI bus)."""
        device = NvmlDevice(self, c_void_p())
        self._call_or_raise("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device.handle))
        return device

    # --- single calls ---

    def call_unchecked(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code; NO_FUNCTION if the driver does not have it."""
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function else NO_FUNCTION

    def try_call(self, name: str, *arguments: Any) -> bool:
        """Return whether a call succeeded; raise if the device is lost or needs a reset."""
        code = self.call_unchecked(name, *arguments)
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return code == SUCCESS

    def read_uint(self, name: str, *arguments: Any) -> int | None:
        """Return the unsigned integer that a call writes to its last argument."""
        value = c_uint()
        return value.value if self.try_call(name, *arguments, byref(value)) else None

    def query_text(self, name: str, *arguments: Any) -> str | None:
        """Return the string that a call writes to a buffer; no string of NVML is longer than 96."""
        buffer = ctypes.create_string_buffer(96)
        if not self.try_call(name, *arguments, buffer, c_uint(len(buffer))):
            return None
        return buffer.value.decode(errors="replace")

    def _call_or_raise(self, name: str, *arguments: Any) -> None:
        if code := self.call_unchecked(name, *arguments):
            raise NvmlError(code)


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    """Yield the initialized library and close it afterwards."""
    nvml = Nvml()
    try:
        yield nvml
    finally:
        nvml.close()


def _to_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _unpack_processes(raw: bytes, count: int, entry_bytes: int) -> list[NvmlProcess]:
    """Return the entries of a process list.

    Whether this driver writes wide entries is seen from the buffer: only they reach beyond
    ``count`` entries of the regular size.
    """
    beyond_regular = raw[_PROCESS_BYTES * count : _PROCESS_WIDE_BYTES * count]
    if entry_bytes == _PROCESS_BYTES and beyond_regular.strip(_UNWRITTEN):
        entry_bytes = _PROCESS_WIDE_BYTES
    entries = [struct.unpack_from("=I4xQ", raw, entry_bytes * i) for i in range(count)]
    return [
        NvmlProcess(pid, None if memory == _UNKNOWN_MEMORY else memory) for pid, memory in entries
    ]
