"""Which devices a process would see, as CUDA decides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from echelon.gpus.nvml import Nvml, NvmlError, open_nvml

T = TypeVar("T")


def count_visible_gpus(env: Mapping[str, str]) -> int:
    """How many CUDA devices a process with these variables would see."""
    chosen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (
        _count_mig_slices(chosen)
        if chosen[0].strip().startswith("MIG-")
        else len(list_visible_gpus(env))
    )


def list_visible_gpus(env: Mapping[str, str]) -> list[int]:
    """The GPUs that a process with these variables would see, by NVML's numbers; none of MIG's.

    Follows what CUDA does with CUDA_VISIBLE_DEVICES: the list ends at its first invalid entry, and
    a device named twice hides them all. No driver, or one that fails, is no device.
    """
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(_count_devices()))
    entries = [entry.strip() for entry in wanted.split(",")]
    if not re.match(r"\+?\d|GPU-", entries[0]):
        return []  # hidden on purpose ("", "-1", "NoDevFiles"): spare the driver's start
    if entries[0].startswith("GPU-"):
        uuids = _list_uuids()
        return _take_until_invalid(_find_by_uuid(entry, uuids) for entry in entries)
    devices = _count_devices()
    return _take_until_invalid(_find_by_index(entry, devices) for entry in entries)


def _take_until_invalid(found: Iterable[int | None]) -> list[int]:
    """The devices before the first invalid entry; none where one is named twice."""
    seen: list[int] = []
    for index in found:
        if index is None:
            break
        if index in seen:
            return []
        seen.append(index)
    return seen


def _find_by_index(entry: str, devices: int) -> int | None:
    # CUDA reads as C's strtoul does: "1gpu" is 1.
    match = re.match(r"\+?(\d+)", entry)
    return int(match[1]) if match and int(match[1]) < devices else None


def _find_by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """The one device whose UUID begins so; a beginning that fits two names neither."""
    if not entry.startswith("GPU-"):
        return None
    fits = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fits[0] if len(fits) == 1 else None


def _count_mig_slices(entries: Sequence[str]) -> int:
    """MIG slices as they are given: telling a wrong name needs a walk over every GPU's slices."""
    slices: list[str] = []
    for entry in map(str.strip, entries):
        if not entry.startswith("MIG-"):
            break
        if entry in slices:
            return 0
        slices.append(entry)
    return len(slices) if _count_devices() else 0


def _count_devices() -> int:
    return _query_nvml(lambda nvml: nvml.count_devices(), 0)


def _list_uuids() -> list[str]:
    """The UUID of every GPU, in NVML's order."""
    return _query_nvml(
        lambda nvml: [nvml.open_device(i).read_uuid() or "" for i in range(nvml.count_devices())],
        [],
    )


def _query_nvml(question: Callable[[Nvml], T], otherwise: T) -> T:
    """One question to NVML, opened for it and closed again."""
    try:
        with open_nvml() as nvml:
            return question(nvml)
    except NvmlError:  # no library, no driver, no permission: no device for us
        return otherwise
