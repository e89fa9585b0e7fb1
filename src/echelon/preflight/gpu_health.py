"""Whether the GPUs that a process would get are free and healthy, read from NVML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.gpus.availability import list_visible_gpus
from echelon.gpus.formatting import format_memory_size, format_percent
from echelon.gpus.nvml import NvmlError, open_nvml
from echelon.gpus.probe import GPU_FAULTS, Gpu, GpuNode, GpuProbe, GpuProcess


def read_gpu_health(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one entry per GPU of this machine that is visible or has a visible MIG slice.

    ``trouble`` is empty for a healthy GPU, ``users`` for one that nobody uses. Without NVML the
    list is empty.
    """
    probe = GpuProbe()
    try:
        node = probe.read_node()
    finally:
        probe.close()
    return [
        {
            "index": gpu.index,
            "name": gpu.name or "?",
            "trouble": gpu.fault or _describe_memory_errors(gpu.index),
            "users": _describe_users(gpu),
        }
        for gpu in _select_visible_gpus(node, env)
    ]


def _select_visible_gpus(node: GpuNode, env: Mapping[str, str]) -> list[Gpu]:
    """Return the visible GPUs; where slices are chosen, their GPUs with these slices alone."""
    entries = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if entries[0].startswith("MIG-"):
        gpus = [
            gpu._replace(slices=tuple(part for part in gpu.slices if part.uuid in entries))
            for gpu in node.gpus
        ]
        return [gpu for gpu in gpus if gpu.slices]
    visible_gpus = list_visible_gpus(env)
    return [gpu for gpu in node.gpus if gpu.index in visible_gpus]


def _describe_users(gpu: Gpu) -> list[str]:
    """Return the processes on a GPU, or what is in use where no process is listed."""
    if processes := gpu.list_all_processes():
        return [_describe_process(process) for process in processes]
    if gpu.idle or gpu.mig or gpu.fault:
        return []
    memory, use = format_memory_size(gpu.memory_used_bytes), format_percent(gpu.use_percent)
    return [f"{memory} and {use} by a process that is not visible"]


def _describe_process(process: GpuProcess) -> str:
    name = (
        f"{process.user}'s process {process.pid}"
        if process.pid
        else "a process that is not visible"
    )
    return f"{name} ({format_memory_size(process.memory_bytes)})"


def _describe_memory_errors(index: int) -> str:
    """Return what is wrong with the memory of a GPU; empty if nothing is."""
    try:
        with open_nvml() as nvml:
            errors = nvml.open_device(index).count_memory_errors()
    except NvmlError as error:
        return GPU_FAULTS.get(error.code, str(error))
    return f"{errors} uncorrected memory errors" if errors else ""
