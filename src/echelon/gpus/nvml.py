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
_MOST = 1 << 15
"""Processes; a driver that wants room for more has lost its mind."""
_PROCESS, _PROCESS_V1 = 24, 16
"""Bytes of a process in NVML's lists."""
_PROCESS_WIDE = 32
"""Some drivers of 2023 append a field without saying so."""


class NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"NVML's error {code}")
        self.code = code


class Used(NamedTuple):
    """A process on a device, as the driver lists it."""

    pid: int
    memory: int | None
    """In bytes."""


class Memory(NamedTuple):
    """In bytes."""

    used: int
    total: int
    exact: bool
    """Whether what the driver keeps for itself is left out of `used`."""


class Device(NamedTuple):
    """A GPU, or a slice of one. What it cannot tell is None; only a lost one is an error."""

    nvml: Nvml
    handle: c_void_p

    def name(self) -> str | None:
        return self.nvml.text("nvmlDeviceGetName", self.handle)

    def uuid(self) -> str | None:
        return self.nvml.text("nvmlDeviceGetUUID", self.handle)

    def use_percent(self) -> int | None:
        rates = (c_uint * 2)()  # of the processors, of the way to the memory
        told = self.nvml.told("nvmlDeviceGetUtilizationRates", self.handle, byref(rates))
        return rates[0] if told else None

    def temperature_c(self) -> int | None:
        return self.nvml.number("nvmlDeviceGetTemperature", self.handle, c_uint(0))

    def power_w(self) -> float | None:
        return _watts(self.nvml.number("nvmlDeviceGetPowerUsage", self.handle))

    def power_limit_w(self) -> float | None:
        return _watts(self.nvml.number("nvmlDeviceGetEnforcedPowerLimit", self.handle))

    def fan_percent(self) -> int | None:
        return self.nvml.number("nvmlDeviceGetFanSpeed", self.handle)

    def capability(self) -> tuple[int, int] | None:
        major, minor = c_uint(), c_uint()
        name = "nvmlDeviceGetCudaComputeCapability"
        told = self.nvml.told(name, self.handle, byref(major), byref(minor))
        return (major.value, minor.value) if told else None

    def memory_errors(self) -> int:
        """That could not be corrected, since the driver was loaded; 0 without ECC."""
        errors, uncorrected, since_loaded = c_ulonglong(), c_uint(1), c_uint(0)
        name = "nvmlDeviceGetTotalEccErrors"
        self.nvml.told(name, self.handle, uncorrected, since_loaded, byref(errors))
        return errors.value

    def memory(self) -> Memory | None:
        newer = (c_ulonglong * 5)()  # version, total, reserved, free, used
        newer[0] = ctypes.sizeof(newer) | 2 << 24
        if self.nvml.told("nvmlDeviceGetMemoryInfo_v2", self.handle, byref(newer)):
            return Memory(newer[4], newer[1], exact=True)
        older = (c_ulonglong * 3)()  # total, free, used
        if self.nvml.told("nvmlDeviceGetMemoryInfo", self.handle, byref(older)):
            return Memory(older[2], older[0], exact=False)
        return None

    def processes(self) -> list[Used] | None:
        """Those that compute and those that draw; None: the driver does not tell."""
        computing = self._list_of("nvmlDeviceGetComputeRunningProcesses")
        drawing = self._list_of("nvmlDeviceGetGraphicsRunningProcesses")
        if computing is None and drawing is None:
            return None
        both = {used.pid: used for used in [*(drawing or ()), *(computing or ())]}
        return list(both.values())

    def _list_of(self, name: str) -> list[Used] | None:
        for version, size in (("_v3", _PROCESS), ("_v2", _PROCESS), ("", _PROCESS_V1)):
            if (found := self._list_by(name + version, size)) is not None:
                return found
        return None

    def _list_by(self, name: str, size: int) -> list[Used] | None:
        """More may come between the answer how many there are and the next question."""
        room, code = 0, INSUFFICIENT_SIZE
        while code == INSUFFICIENT_SIZE and room < _MOST:
            count = c_uint(room)
            buffer = ctypes.create_string_buffer(_UNWRITTEN * (_PROCESS_WIDE * room + 1))
            code = self.nvml.code(name, self.handle, byref(count), buffer if room else None)
            room = max(room, count.value) + 8
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return _unpacked(buffer.raw, count.value, size) if code == SUCCESS else None

    def is_cut_up(self) -> bool:
        """By MIG, into slices."""
        now, later = c_uint(), c_uint()
        told = self.nvml.told("nvmlDeviceGetMigMode", self.handle, byref(now), byref(later))
        return told and bool(now.value)

    def slices(self) -> Iterator[Device]:
        most = self.nvml.number("nvmlDeviceGetMaxMigDeviceCount", self.handle) or 0
        for index in range(most):
            slice_ = Device(self.nvml, c_void_p())
            name = "nvmlDeviceGetMigDeviceHandleByIndex"
            if self.nvml.told(name, self.handle, c_uint(index), byref(slice_.handle)):
                yield slice_


class Nvml:
    """The open library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NvmlError(NO_LIBRARY) from None
        self._demand("nvmlInit_v2")

    def close(self) -> None:
        self.code("nvmlShutdown")

    def driver(self) -> str | None:
        return self.text("nvmlSystemGetDriverVersion")

    def cuda(self) -> str | None:
        """The newest that the driver supports."""
        number = self.number("nvmlSystemGetCudaDriverVersion_v2")
        number = number or self.number("nvmlSystemGetCudaDriverVersion")
        return f"{number // 1000}.{number % 1000 // 10}" if number else None

    def count(self) -> int:
        count = c_uint()
        self._demand("nvmlDeviceGetCount_v2", byref(count))
        return count.value

    def device(self, index: int) -> Device:
        device = Device(self, c_void_p())
        self._demand("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device.handle))
        return device

    # --- one call ---

    def code(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function else NO_FUNCTION

    def told(self, name: str, *arguments: Any) -> bool:
        code = self.code(name, *arguments)
        if code in (LOST, RESET_REQUIRED):
            raise NvmlError(code)
        return code == SUCCESS

    def number(self, name: str, *arguments: Any) -> int | None:
        value = c_uint()
        return value.value if self.told(name, *arguments, byref(value)) else None

    def text(self, name: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        if not self.told(name, *arguments, buffer, c_uint(len(buffer))):
            return None
        return buffer.value.decode(errors="replace")

    def _demand(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise NvmlError(code)


@contextmanager
def opened() -> Iterator[Nvml]:
    nvml = Nvml()
    try:
        yield nvml
    finally:
        nvml.close()


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _unpacked(raw: bytes, count: int, size: int) -> list[Used]:
    """What was written tells how wide an entry is."""
    beyond = raw[_PROCESS * count : _PROCESS_WIDE * count]
    if size == _PROCESS and beyond.strip(_UNWRITTEN):
        size = _PROCESS_WIDE
    entries = [struct.unpack_from("=I4xQ", raw, size * i) for i in range(count)]
    return [Used(pid, None if m == _UNKNOWN_MEMORY else m) for pid, m in entries]
