"""The energy that the GPUs of a start have used, as their counters say (NVML, from Volta on).

A thread reads the counters when a start begins, once a minute, and at its end, and keeps the
difference in a small file of the machine. So a start that is killed loses a minute at the most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from echelon.gpus.availability import open_visible_devices
from echelon.gpus.nvml import Nvml, NvmlDevice, NvmlError
from echelon.utils.files import write_json_atomically

_INTERVAL_S = 60.0
_CLOSE_LIMIT_S = 2.0
"""A driver whose GPU is broken may not answer."""


class EnergyMeter:
    """Measures the first GPUs that processes with these variables see. Where there is none, or
    none that counts its energy, nothing is written."""

    def __init__(
        self, folder: Path, env: Mapping[str, str], device_count: int | None = None
    ) -> None:
        """``folder`` is made when there is something to write. ``device_count=None``: all."""
        self._folder, self._env, self._device_count = folder, dict(env), device_count
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True, name="energy")
        self._thread.start()

    def close(self) -> None:
        """Read the counters a last time, and end the thread."""
        self._is_closed.set()
        self._thread.join(_CLOSE_LIMIT_S)

    def _measure(self) -> None:
        with contextlib.suppress(NvmlError, OSError):
            nvml = Nvml()
            try:
                self._follow_counters(nvml)
            finally:
                nvml.close()

    def _follow_counters(self, nvml: Nvml) -> None:
        devices = open_visible_devices(nvml, self._env, self._device_count)
        first, started = _read_counters(devices), time.time()
        file = self._folder / f"{socket.gethostname()}-{int(started * 1000)}.json"
        used: dict[str, float] = {}
        is_last = False
        while first:
            used |= {  # what is known of a GPU that was lost meanwhile stays
                name: max(0.0, joules - first[name])
                for name, joules in _read_counters(devices).items()
                if name in first
            }
            self._folder.mkdir(exist_ok=True)
            times = {"started": round(started, 3), "updated": round(time.time(), 3)}
            write_json_atomically(file, {"host": socket.gethostname(), **times, "joules": used})
            if is_last:
                return
            is_last = self._is_closed.wait(_INTERVAL_S)


def _read_counters(devices: Mapping[int, NvmlDevice]) -> dict[str, float]:
    """Return what each device has counted in joules, by its UUID; one that does not answer or does
    not count is left out."""
    found: dict[str, float] = {}
    for device in devices.values():
        with contextlib.suppress(NvmlError):
            name, energy_j = device.read_uuid(), device.read_energy_j()
            if name is not None and energy_j is not None:
                found[name] = energy_j
    return found
