"""Whether the GPUs of some processes count errors that they did not count before.

A GPU that meets an uncorrectable error may go on with wrong numbers, or end what runs on it. NVML's
counters show both. Xid events are not read: those that a machine is to blame for raise a counter or
lose the GPU; the others are errors of programs.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.gpus.availability import open_visible_devices
from echelon.gpus.nvml import LOST, RESET_REQUIRED, Nvml, NvmlError
from echelon.gpus.probe import GPU_FAULTS


class GpuErrorCounts:
    """The counters of the first `count` GPUs that a process with these variables sees, compared
    with what they were at first. Raises NvmlError where there is no NVML."""

    def __init__(self, env: Mapping[str, str], count: int) -> None:
        self._nvml = Nvml()
        self._devices = open_visible_devices(self._nvml, env, count)
        self._first_counts: dict[int, dict[str, int]] = {}
        self.find_new_errors()

    @property
    def is_empty(self) -> bool:
        """Whether there is no GPU to look at."""
        return not self._devices

    def close(self) -> None:
        """Release NVML."""
        self._nvml.close()

    def find_new_errors(self) -> str:
        """Return what one of the GPUs has counted since the beginning, for a person; else "".

        A GPU that could not be read at first is no error of this run.
        """
        for index, device in self._devices.items():
            known = self._first_counts.get(index)
            try:
                counts = device.read_error_counts()
            except NvmlError as error:
                if known is not None and error.code in (LOST, RESET_REQUIRED):
                    return f"GPU {index}: {GPU_FAULTS[error.code]}"
                continue
            first = self._first_counts.setdefault(index, counts)
            for name, value in counts.items():
                if value > (before := first.setdefault(name, value)):
                    return f"GPU {index}: {name} rose from {before} to {value}"
        return ""
