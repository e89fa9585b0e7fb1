"""Whether the GPUs that a process would get are free and healthy, by NVML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.gpus import words
from echelon.gpus.look import FAULTS, Machine
from echelon.gpus.nvml import NvmlError, opened
from echelon.gpus.snapshot import Gpu, Node, Process
from echelon.gpus.visible import visible


def look(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry per GPU of this machine that is visible, or has a slice that is; none where NVML is
    not."""
    machine = Machine()
    try:
        node = machine.look()
    finally:
        machine.close()
    return [
        {
            "index": gpu.index,
            "name": gpu.name or "?",
            "trouble": gpu.fault or _damage(gpu.index),
            "users": _users(gpu),
        }
        for gpu in _chosen(node, env)
    ]


def _chosen(node: Node, env: Mapping[str, str]) -> list[Gpu]:
    slices = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if slices[0].startswith("MIG-"):
        parts = [
            gpu._replace(slices=tuple(s for s in gpu.slices if s.uuid in slices))
            for gpu in node.gpus
        ]
        return [gpu for gpu in parts if gpu.slices]
    seen = visible(env)
    return [gpu for gpu in node.gpus if gpu.index in seen]


def _users(gpu: Gpu) -> list[str]:
    """Those on it; or what they hold, where they cannot be seen."""
    if everyone := gpu.everyone():
        return [_user(process) for process in everyone]
    if gpu.idle or gpu.mig or gpu.fault:
        return []
    return [
        f"{words.with_unit(gpu.memory_used_bytes)} and {words.percent(gpu.use_percent)} by somebody"
    ]


def _user(process: Process) -> str:
    who = (
        f"{process.user}'s process {process.pid}"
        if process.pid
        else "a process that cannot be seen"
    )
    return f"{who} ({words.with_unit(process.memory_bytes)})"


def _damage(index: int) -> str:
    """Errors of its memory."""
    try:
        with opened() as nvml:
            errors = nvml.device(index).memory_errors()
    except NvmlError as error:
        return FAULTS.get(error.code, str(error))
    return f"{errors} uncorrected errors of its memory" if errors else ""
