"""Who is on the devices that a training is about to take."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from echelon.gpus import words
from echelon.gpus.look import Machine
from echelon.gpus.processes import parent
from echelon.gpus.snapshot import Gpu, Process
from echelon.gpus.visible import visible


def company(devices: Sequence[str], env: Mapping[str, str], shared: bool = False) -> list[str]:
    """A sentence for each device (`cuda:0`) that somebody else uses; without NVML, or on slices of
    MIG, none. `shared`: with ranks that were started beside this one, on purpose."""
    seen = visible(env)
    numbers = {int(device.partition(":")[2] or 0) for device in devices if "cuda" in device}
    wanted = sorted(seen[number] for number in numbers if number < len(seen))
    if not wanted:
        return []
    machine = Machine()
    try:
        node = machine.look(wanted)
    finally:
        machine.close()
    ours = {os.getpid(), *([os.getppid()] if shared else [])}
    found = [(gpu, [p for p in gpu.processes if _is_other(p, ours)]) for gpu in node.gpus]
    return [_sentence(gpu, others) for gpu, others in found if others or _is_held(gpu)]


def _is_other(process: Process, ours: Collection[int]) -> bool:
    """Neither one of ours, nor a child of one."""
    if not process.memory_bytes:
        return False
    return process.pid is None or (process.pid not in ours and parent(process.pid) not in ours)


def _is_held(gpu: Gpu) -> bool:
    """By a process that the driver does not list, as of another container."""
    return not (gpu.idle or gpu.processes or gpu.mig or gpu.fault)


def _sentence(gpu: Gpu, others: Sequence[Process]) -> str:
    hint = "`echelon gpus --free` names those that are idle"
    if not others:
        memory = words.with_unit(gpu.memory_used_bytes)
        return f"GPU {gpu.index} is in use: by somebody who cannot be seen, {memory}; {hint}"
    most = max(others, key=lambda p: p.memory_bytes or 0)
    who = f"{most.user}'s process {most.pid}" if most.pid else "a process that cannot be seen"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    memory = words.with_unit(sum(p.memory_bytes or 0 for p in others))
    return f"GPU {gpu.index} is in use: {who}{more}, {memory}; {hint}"
