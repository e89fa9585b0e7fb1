"""Which devices a process would see, as CUDA decides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from echelon.gpus.nvml import Nvml, NvmlError, opened

T = TypeVar("T")


def visible_count(env: Mapping[str, str]) -> int:
    """How many CUDA devices a process with these variables would see."""
    chosen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return _mig_count(chosen) if chosen[0].strip().startswith("MIG-") else len(visible(env))


def visible(env: Mapping[str, str]) -> list[int]:
    """The GPUs that a process with these variables would see, by NVML's numbers; none of MIG's.

    Follows what CUDA does with CUDA_VISIBLE_DEVICES: the list ends at its first invalid entry, and
    a device named twice hides them all. No driver, or one that fails, is no device.
    """
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(_device_count()))
    entries = [entry.strip() for entry in wanted.split(",")]
    if not re.match(r"\+?\d|GPU-", entries[0]):
        return []  # hidden on purpose ("", "-1", "NoDevFiles"): spare the driver's start
    if entries[0].startswith("GPU-"):
        uuids = _uuids()
        return _until_invalid(_by_uuid(entry, uuids) for entry in entries)
    devices = _device_count()
    return _until_invalid(_by_index(entry, devices) for entry in entries)


def _until_invalid(found: Iterable[int | None]) -> list[int]:
    """The devices before the first invalid entry; none where one is named twice."""
    seen: list[int] = []
    for index in found:
        if index is None:
            break
        if index in seen:
            return []
        seen.append(index)
    return seen


def _by_index(entry: str, devices: int) -> int | None:
    # CUDA reads as C's strtoul does: "1gpu" is 1.
    match = re.match(r"\+?(\d+)", entry)
    return int(match[1]) if match and int(match[1]) < devices else None


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """The one device whose UUID begins so; a beginning that fits two names neither."""
    if not entry.startswith("GPU-"):
        return None
    fits = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fits[0] if len(fits) == 1 else None


def _mig_count(entries: Sequence[str]) -> int:
    """MIG slices as they are given: telling a wrong name needs a walk over every GPU's slices."""
    slices: list[str] = []
    for entry in map(str.strip, entries):
        if not entry.startswith("MIG-"):
            break
        if entry in slices:
            return 0
        slices.append(entry)
    return len(slices) if _device_count() else 0


def _device_count() -> int:
    return _ask(lambda nvml: nvml.count(), 0)


def _uuids() -> list[str]:
    """The UUID of every GPU, in NVML's order."""
    return _ask(lambda nvml: [nvml.device(i).uuid() or "" for i in range(nvml.count())], [])


def _ask(question: Callable[[Nvml], T], otherwise: T) -> T:
    """One question to NVML, opened for it and closed again."""
    try:
        with opened() as nvml:
            return question(nvml)
    except NvmlError:  # no library, no driver, no permission: no device for us
        return otherwise
