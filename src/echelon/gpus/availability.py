"""Which GPUs a process would see, which of them are idle, and who occupies the others.

Counting visible GPUs is on the way of every launch, so only ``nvml`` is imported at the top.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from echelon.gpus.nvml import Nvml, NvmlDevice, NvmlError, open_nvml

if TYPE_CHECKING:
    from echelon.gpus.probe import Gpu, GpuNode, GpuProcess

T = TypeVar("T")

# --- visible: what CUDA would show to a process ---


def count_visible_gpus(env: Mapping[str, str]) -> int:
    """Return how many CUDA devices a process with these variables would see.

    The CUDA driver is not started, so a process that counts can still be forked. A driver that is
    missing or fails counts as no device.
    """
    entries = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if entries[0].strip().startswith("MIG-"):
        return _count_mig_slices(entries)
    return len(list_visible_gpus(env))


def list_visible_gpus(env: Mapping[str, str]) -> list[int]:
    """Return the GPUs that a process with these variables would see, as NVML's indices.

    Follows what CUDA does with CUDA_VISIBLE_DEVICES: the list ends at its first invalid entry, and
    a device that is named twice hides all of them. MIG slices are not listed.
    """
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(_count_devices()))
    entries = [entry.strip() for entry in wanted.split(",")]
    if not re.match(r"\+?\d|GPU-", entries[0]):
        return []  # hidden on purpose ("", "-1", "NoDevFiles"): NVML need not be loaded
    if entries[0].startswith("GPU-"):
        uuids = _list_uuids()
        return _take_until_invalid(_find_by_uuid(entry, uuids) for entry in entries)
    device_count = _count_devices()
    return _take_until_invalid(_find_by_index(entry, device_count) for entry in entries)


def open_visible_devices(
    nvml: Nvml, env: Mapping[str, str], count: int | None
) -> dict[int, NvmlDevice]:
    """Return the first GPUs that a process with these variables sees, by their indices; of MIG
    slices, those that they are parts of. None: all of them."""
    entries = [entry.strip() for entry in env.get("CUDA_VISIBLE_DEVICES", "").split(",")][:count]
    indices = list_visible_gpus(env)[:count]
    devices: dict[int, NvmlDevice] = {}
    for index in range(nvml.count_devices()):
        try:
            device = nvml.open_device(index)
            is_used = index in indices
            if entries and entries[0].startswith("MIG-"):
                is_used = any(part.read_uuid() in entries for part in device.iter_slices())
        except NvmlError:  # it is lost already
            continue
        if is_used:
            devices[index] = device
    return devices


def _take_until_invalid(indices: Iterable[int | None]) -> list[int]:
    """Return the indices before the first None; empty if one is repeated."""
    taken: list[int] = []
    for index in indices:
        if index is None:
            break
        if index in taken:
            return []
        taken.append(index)
    return taken


def _find_by_index(entry: str, device_count: int) -> int | None:
    # CUDA reads numbers as C's strtoul does: "1gpu" is 1.
    match = re.match(r"\+?(\d+)", entry)
    return int(match[1]) if match and int(match[1]) < device_count else None


def _find_by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """Return the device whose UUID begins with the entry; None if that is not exactly one."""
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _count_mig_slices(entries: Sequence[str]) -> int:
    """Return how many MIG slices are named.

    Whether they exist is not checked: that would take a walk over the slices of every GPU.
    """
    slices: list[str] = []
    for entry in map(str.strip, entries):
        if not entry.startswith("MIG-"):
            break
        if entry in slices:
            return 0
        slices.append(entry)
    return len(slices) if _count_devices() else 0


def _count_devices() -> int:
    return _query_nvml_or_default(lambda nvml: nvml.count_devices(), 0)


def _list_uuids() -> list[str]:
    """Return the UUID of every GPU, in NVML's order."""
    return _query_nvml_or_default(
        lambda nvml: [nvml.open_device(i).read_uuid() or "" for i in range(nvml.count_devices())],
        [],
    )


def _query_nvml_or_default(query: Callable[[Nvml], T], default: T) -> T:
    """Open NVML for one query; return the default without a library, driver or permission."""
    try:
        with open_nvml() as nvml:
            return query(nvml)
    except NvmlError:
        return default


# --- idle ---


def list_idle_gpus(node: GpuNode, env: Mapping[str, str]) -> list[str]:
    """Return the idle GPUs of those that CUDA_VISIBLE_DEVICES allows, as entries for it.

    The entries are indices where that is safe. With several GPU models CUDA numbers the fastest
    first while NVML follows the PCI bus, so only UUIDs name the same device to both. If all GPUs
    are in MIG mode, the entries are the UUIDs of idle slices.
    """
    allowed = list_visible_gpus(env) if "CUDA_VISIBLE_DEVICES" in env else range(1 << 16)
    gpus = [gpu for gpu in node.gpus if gpu.index in allowed]
    if gpus and all(gpu.mig for gpu in gpus):
        return [part.uuid for gpu in gpus for part in gpu.slices if part.idle and part.uuid]
    idle = [gpu for gpu in gpus if gpu.idle]
    has_several_models = len({gpu.name for gpu in node.gpus if gpu.name}) > 1
    if has_several_models and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [gpu.uuid or str(gpu.index) for gpu in idle]
    return [str(gpu.index) for gpu in idle]


# --- occupied: who is on the devices that a training is about to take ---


def describe_other_users(
    devices: Sequence[str], env: Mapping[str, str], has_sibling_ranks: bool = False
) -> list[str]:
    """Return a sentence for each device (``cuda:0``) that somebody else uses.

    Empty without NVML and for MIG slices. With ``has_sibling_ranks``, processes of the same parent
    are ranks that share the device on purpose and are not reported.
    """
    from echelon.gpus.probe import GpuProbe

    visible_gpus = list_visible_gpus(env)
    numbers = {int(device.partition(":")[2] or 0) for device in devices if "cuda" in device}
    indices = sorted(visible_gpus[number] for number in numbers if number < len(visible_gpus))
    if not indices:
        return []
    probe = GpuProbe()
    try:
        node = probe.read_node(indices)
    finally:
        probe.close()
    own_pids = {os.getpid(), *([os.getppid()] if has_sibling_ranks else [])}
    sentences = []
    for gpu in node.gpus:
        others = [process for process in gpu.processes if _is_unrelated_process(process, own_pids)]
        if others or _has_hidden_user(gpu):
            sentences.append(_describe_occupied_gpu(gpu, others))
    return sentences


def _is_unrelated_process(process: GpuProcess, own_pids: Collection[int]) -> bool:
    """Return whether a process is neither one of these nor a child of one."""
    from echelon.gpus.processes import read_parent_pid

    if not process.memory_bytes:
        return False
    return process.pid is None or (
        process.pid not in own_pids and read_parent_pid(process.pid) not in own_pids
    )


def _has_hidden_user(gpu: Gpu) -> bool:
    """Return whether a process that the driver does not list, as of another container, uses it."""
    return not (gpu.idle or gpu.processes or gpu.mig or gpu.fault)


def _describe_occupied_gpu(gpu: Gpu, others: Sequence[GpuProcess]) -> str:
    from echelon.gpus.formatting import format_memory_size

    hint = "`echelon gpus --free` lists those that are idle"
    if not others:
        memory = format_memory_size(gpu.memory_used_bytes)
        return f"GPU {gpu.index} is in use: by a process that is not visible, {memory}; {hint}"
    largest = max(others, key=lambda process: process.memory_bytes or 0)
    user = (
        f"{largest.user}'s process {largest.pid}"
        if largest.pid
        else "a process that is not visible"
    )
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    memory = format_memory_size(sum(process.memory_bytes or 0 for process in others))
    return f"GPU {gpu.index} is in use: {user}{more}, {memory}; {hint}"
