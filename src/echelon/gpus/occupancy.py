"""Who is on the devices that a training is about to take."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from echelon.gpus import formatting
from echelon.gpus.probe import GpuProbe
from echelon.gpus.processes import read_parent_pid
from echelon.gpus.state import Gpu, GpuProcess
from echelon.gpus.visible_devices import list_visible_gpus


def describe_other_users(
    devices: Sequence[str], env: Mapping[str, str], has_sibling_ranks: bool = False
) -> list[str]:
    """A sentence for each device (`cuda:0`) that somebody else uses; without NVML, or on slices of
    MIG, none. `shared`: with ranks that were started beside this one, on purpose."""
    visible_gpus = list_visible_gpus(env)
    numbers = {int(device.partition(":")[2] or 0) for device in devices if "cuda" in device}
    wanted = sorted(visible_gpus[number] for number in numbers if number < len(visible_gpus))
    if not wanted:
        return []
    machine = GpuProbe()
    try:
        node = machine.read_node(wanted)
    finally:
        machine.close()
    own_pids = {os.getpid(), *([os.getppid()] if has_sibling_ranks else [])}
    gpu_users = [(gpu, [p for p in gpu.processes if _is_other(p, own_pids)]) for gpu in node.gpus]
    return [
        _describe_occupied_gpu(gpu, others)
        for gpu, others in gpu_users
        if others or _has_hidden_user(gpu)
    ]


def _is_other(process: GpuProcess, own_pids: Collection[int]) -> bool:
    """Neither one of ours, nor a child of one."""
    if not process.memory_bytes:
        return False
    return process.pid is None or (
        process.pid not in own_pids and read_parent_pid(process.pid) not in own_pids
    )


def _has_hidden_user(gpu: Gpu) -> bool:
    """By a process that the driver does not list, as of another container."""
    return not (gpu.idle or gpu.processes or gpu.mig or gpu.fault)


def _describe_occupied_gpu(gpu: Gpu, others: Sequence[GpuProcess]) -> str:
    hint = "`echelon gpus --free` names those that are idle"
    if not others:
        memory = formatting.format_memory_size(gpu.memory_used_bytes)
        return f"GPU {gpu.index} is in use: by somebody who cannot be seen, {memory}; {hint}"
    most = max(others, key=lambda p: p.memory_bytes or 0)
    who = f"{most.user}'s process {most.pid}" if most.pid else "a process that cannot be seen"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    memory = formatting.format_memory_size(sum(p.memory_bytes or 0 for p in others))
    return f"GPU {gpu.index} is in use: {who}{more}, {memory}; {hint}"
