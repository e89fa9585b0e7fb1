"""Whether the GPUs that a process would get are free and healthy, by NVML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.gpus import formatting
from echelon.gpus.nvml import NvmlError, open_nvml
from echelon.gpus.probe import GPU_FAULTS, GpuProbe
from echelon.gpus.state import Gpu, GpuNode, GpuProcess
from echelon.gpus.visible_devices import list_visible_gpus


def read_gpu_health(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry per GPU of this machine that is visible, or has a slice that is; none where NVML is
    not."""
    machine = GpuProbe()
    try:
        node = machine.read_node()
    finally:
        machine.close()
    return [
        {
            "index": gpu.index,
            "name": gpu.name or "?",
            "trouble": gpu.fault or _describe_damage(gpu.index),
            "users": _describe_users(gpu),
        }
        for gpu in _select_visible_gpus(node, env)
    ]


def _select_visible_gpus(node: GpuNode, env: Mapping[str, str]) -> list[Gpu]:
    slices = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if slices[0].startswith("MIG-"):
        parts = [
            gpu._replace(slices=tuple(s for s in gpu.slices if s.uuid in slices))
            for gpu in node.gpus
        ]
        return [gpu for gpu in parts if gpu.slices]
    seen = list_visible_gpus(env)
    return [gpu for gpu in node.gpus if gpu.index in seen]


def _describe_users(gpu: Gpu) -> list[str]:
    """Those on it; or what they hold, where they cannot be seen."""
    if everyone := gpu.list_all_processes():
        return [_describe_process(process) for process in everyone]
    if gpu.idle or gpu.mig or gpu.fault:
        return []
    return [
        f"{formatting.format_memory_size(gpu.memory_used_bytes)} and {formatting.format_percent(gpu.use_percent)} by somebody"
    ]


def _describe_process(process: GpuProcess) -> str:
    who = (
        f"{process.user}'s process {process.pid}"
        if process.pid
        else "a process that cannot be seen"
    )
    return f"{who} ({formatting.format_memory_size(process.memory_bytes)})"


def _describe_damage(index: int) -> str:
    """Errors of its memory."""
    try:
        with open_nvml() as nvml:
            errors = nvml.open_device(index).count_memory_errors()
    except NvmlError as error:
        return GPU_FAULTS.get(error.code, str(error))
    return f"{errors} uncorrected errors of its memory" if errors else ""
