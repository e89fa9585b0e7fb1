"""Whether the GPUs that a process would get are free and healthy, by NVML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_BUSY_BYTES = 500 << 20
"""A driver's own share is less."""


def look(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry per GPU of this machine that is visible; none where NVML is not."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # `visible_count` says 0 as well
        return []
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        return [_one(pynvml, index) for index in _chosen(count, env)]
    except pynvml.NVMLError as error:
        return [{"index": 0, "name": "?", "trouble": str(error), "users": []}]
    finally:
        pynvml.nvmlShutdown()


def _chosen(count: int, env: Mapping[str, str]) -> list[int]:
    """By number; devices named by UUID are all looked at."""
    words = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    return [n for n in numbers if n < count] or list(range(count))


def _one(nvml: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "name": "?", "trouble": "", "users": []}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        found["name"] = name.decode() if isinstance(name, bytes) else name
        found["users"] = _users(nvml, handle)
        found["trouble"] = _damage(nvml, handle)
    except nvml.NVMLError as error:
        found["trouble"] = str(error)
    return found


def _users(nvml: Any, handle: Any) -> list[str]:
    """Processes of others that hold memory; or the memory, where they cannot be seen."""
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    pids = [f"process {p.pid}" for p in running if p.pid != os.getpid()]
    used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return pids or ([f"{used / 1e9:.1f} GB by somebody"] if used > _BUSY_BYTES else [])


def _damage(nvml: Any, handle: Any) -> str:
    """Errors of its memory that could not be corrected since the driver was loaded."""
    try:
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:  # a device without ECC
        return ""
    return f"{errors} uncorrected errors of its memory" if errors else ""
