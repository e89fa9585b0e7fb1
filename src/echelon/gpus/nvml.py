"""NVIDIA's management library, called directly.

The official Python binding takes longer to import than a look at eight GPUs takes, and it knows the
process lists of one driver generation at a time. The few calls that are needed here have kept
their form for ten years, and each is tried in its newest version first.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"

SUCCESS, NO_PERMISSION, INSUFFICIENT_SIZE = 0, 4, 7
DRIVER_NOT_LOADED, NO_LIBRARY, NO_FUNCTION = 9, 12, 13
LOST, RESET_REQUIRED, VERSION_MISMATCH = 15, 16, 18

_UNKNOWN_MEMORY = 0xFFFF_FFFF_FFFF_FFFF
_UNWRITTEN = b"\xa5"
_MAX_PROCESSES = 1 << 15
"""Processes; a driver that wants room for more has lost its mind."""
_PROCESS_BYTES, _PROCESS_V1_BYTES = 24, 16
"""Bytes of a process in NVML's lists."""
_PROCESS_WIDE_BYTES = 32
"""Some drivers of 2023 append a field without saying so."""


class NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"NVML's error {code}")
        self.code = code


class NvmlProcess(NamedTuple):
    """A process on a device, as the driver lists it."""

    pid: int
    memory_bytes: int | None
    """In bytes."""


class GpuMemory(NamedTuple):
    """In bytes."""

    used_bytes: int
    total_bytes: int
    excludes_reserved: bool
    """Whether what the driver keeps for itself is left out of `used`."""


class NvmlDevice(NamedTuple):
    """A GPU, or a slice of one. What it cannot tell is None; only a lost one is an error."""

    nvml: Nvml
    handle: c_void_p

    def read_name(self) -> str | None:
        return self.nvml.query_text("nvmlDeviceGetName", self.handle)

    def read_uuid(self) -> str | None:
        return self.nvml.query_text("nvmlDeviceGetUUID", self.handle)

    def read_use_percent(self) -> int | None:
        rates = (c_uint * 2)()  # of the processors, of the way to the memory
        told = self.nvml.try_call("nvmlDeviceGetUtilizationRates", self.handle, byref(rates))
        return rates[0] if told else None

    def read_temperature_c(self) -> int | None:
        return self.nvml.read_uint("nvmlDeviceGetTemperature", self.handle, c_uint(0))

    def read_power_w(self) -> float | None:
        return _to_watts(self.nvml.read_uint("nvmlDeviceGetPowerUsage", self.handle))

    def read_power_limit_w(self) -> float | None:
        return _to_watts(self.nvml.read_uint("nvmlDeviceGetEnforcedPowerLimit", self.handle))

    def read_fan_percent(self) -> int | None:
        return self.nvml.read_uint("nvmlDeviceGetFanSpeed", self.handle)

    def read_compute_capability(self) -> tuple[int, int] | None:
        major, minor = c_uint(), c_uint()
        name = "nvmlDeviceGetCudaComputeCapability"
        told = self.nvml.try_call(name, self.handle, byref(major), byref(minor))
        return (major.value, minor.value) if told else None

    def count_memory_errors(self) -> int:
        """That could not be corrected, since the driver was loaded; 0 without ECC."""
        errors, uncorrected, since_loaded = c_ulonglong(), c_uint(1), c_uint(0)
        name = "nvmlDeviceGetTotalEccErrors"
        self.nvml.try_call(name, self.handle, uncorrected, since_loaded, byref(errors))
        return errors.value

    def read_memory(self) -> GpuMemory | None:
        newer = (c_ulonglong * 5)()  # version, total, reserved, free, used
        newer[0] = ctypes.sizeof(newer) | 2 << 24
        if self.nvml.try_call("nvmlDeviceGetMemoryInfo_v2", self.handle, byref(newer)):
            return GpuMemory(newer[4], newer[1], excludes_reserved=True)
        older = (c_ulonglong * 3)()  # total, free, used
        if self.nvml.try_call("nvmlDeviceGetMemoryInfo", self.handle, byref(older)):
            return GpuMemory(older[2], older[0], excludes_reserved=False)
        return None

    def list_processes(self) -> list[NvmlProcess] | None:
        """Those that compute and those that draw; None: the driver does not tell."""
        computing = self._list_by_newest_call("nvmlDeviceGetComputeRunningProcesses")
        drawing = self._list_by_newest_call("nvmlDeviceGetGraphicsRunningProcesses")
        if computing is None and drawing is None:
            return None
        both = {used.pid: used for used in [*(drawing or ()), *(computing or ())]}
        return list(both.values())

    def _list_by_newest_call(self, name: str) -> list[NvmlProcess] | None:
        for version, size in (
            ("_v3", _PROCESS_BYTES),
            ("_v2", _PROCESS_BYTES),
            ("", _PROCESS_V1_BYTES),
        ):
            if (found := self._list_by_call(name + version, size)) is not None:
                return found
        return None

    def _list_by_call(self, name: str, size: int) -> list[NvmlProcess] | None:
        """More may come between the answer how many there are and the next question."""
        room, code = 0, INSUFFICIENT_SIZE
        while code == INSUFFICIENT_SIZE and room < _MAX_PROCESSES:
            count = c_uint(room)
            buffer = ctypes.create_string_buffer(_UNWRITTEN * (_PROCESS_WIDE_BYTES * room + 1))
            code = self.nvml.call(name, self.handle, byref(count), buffer if room else None)
            room = max(room, count.value) + 8
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return _unpack_processes(buffer.raw, count.value, size) if code == SUCCESS else None

    def is_mig_enabled(self) -> bool:
        """By MIG, into slices."""
        now, later = c_uint(), c_uint()
        told = self.nvml.try_call("nvmlDeviceGetMigMode", self.handle, byref(now), byref(later))
        return told and bool(now.value)

    def iter_slices(self) -> Iterator[NvmlDevice]:
        most = self.nvml.read_uint("nvmlDeviceGetMaxMigDeviceCount", self.handle) or 0
        for index in range(most):
            slice_ = NvmlDevice(self.nvml, c_void_p())
            name = "nvmlDeviceGetMigDeviceHandleByIndex"
            if self.nvml.try_call(name, self.handle, c_uint(index), byref(slice_.handle)):
                yield slice_


class Nvml:
    """The open library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NvmlError(NO_LIBRARY) from None
        self._call_or_raise("nvmlInit_v2")

    def close(self) -> None:
        self.call("nvmlShutdown")

    def read_driver_version(self) -> str | None:
        return self.query_text("nvmlSystemGetDriverVersion")

    def read_cuda_version(self) -> str | None:
        """The newest that the driver supports."""
        number = self.read_uint("nvmlSystemGetCudaDriverVersion_v2")
        number = number or self.read_uint("nvmlSystemGetCudaDriverVersion")
        return f"{number // 1000}.{number % 1000 // 10}" if number else None

    def count_devices(self) -> int:
        count = c_uint()
        self._call_or_raise("nvmlDeviceGetCount_v2", byref(count))
        return count.value

    def open_device(self, index: int) -> NvmlDevice:
        device = NvmlDevice(self, c_void_p())
        self._call_or_raise("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device.handle))
        return device

    # --- one call ---

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function else NO_FUNCTION

    def try_call(self, name: str, *arguments: Any) -> bool:
        code = self.call(name, *arguments)
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return code == SUCCESS

    def read_uint(self, name: str, *arguments: Any) -> int | None:
        value = c_uint()
        return value.value if self.try_call(name, *arguments, byref(value)) else None

    def query_text(self, name: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        if not self.try_call(name, *arguments, buffer, c_uint(len(buffer))):
            return None
        return buffer.value.decode(errors="replace")

    def _call_or_raise(self, name: str, *arguments: Any) -> None:
        if code := self.call(name, *arguments):
            raise NvmlError(code)


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    nvml = Nvml()
    try:
        yield nvml
    finally:
        nvml.close()


def _to_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _unpack_processes(raw: bytes, count: int, size: int) -> list[NvmlProcess]:
    """What was written tells how wide an entry is."""
    beyond = raw[_PROCESS_BYTES * count : _PROCESS_WIDE_BYTES * count]
    if size == _PROCESS_BYTES and beyond.strip(_UNWRITTEN):
        size = _PROCESS_WIDE_BYTES
    entries = [struct.unpack_from("=I4xQ", raw, size * i) for i in range(count)]
    return [NvmlProcess(pid, None if m == _UNKNOWN_MEMORY else m) for pid, m in entries]
