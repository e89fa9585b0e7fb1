"""Facts about the GPUs of this machine, from NVML: torch is not needed to look."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def visible_count(env: Mapping[str, str]) -> int:
    """How many CUDA devices a process with these variables would see.

    Follows what CUDA does with CUDA_VISIBLE_DEVICES: the list ends at its first invalid entry, and
    a device named twice hides them all. No driver, or one that fails, is no device.
    """
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return _device_count()
    entries = [entry.strip() for entry in wanted.split(",")]
    if not _could_be_valid(entries[0]):
        return 0  # hidden on purpose ("", "-1", "NoDevFiles"): spare the driver's start
    if entries[0].startswith("MIG-"):
        return _mig_count(entries)
    if entries[0].startswith("GPU-"):
        uuids = _uuids()
        return _count(_by_uuid(entry, uuids) for entry in entries)
    devices = _device_count()
    return _count(_by_index(entry, devices) for entry in entries)


def _could_be_valid(entry: str) -> bool:
    return bool(re.match(r"\+?\d|GPU-|MIG-", entry))


def _count(found: Iterable[int | None]) -> int:
    """The devices before the first invalid entry; none where one is named twice."""
    seen: list[int] = []
    for index in found:
        if index is None:
            break
        if index in seen:
            return 0
        seen.append(index)
    return len(seen)


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
    for entry in entries:
        if not entry.startswith("MIG-"):
            break
        if entry in slices:
            return 0
        slices.append(entry)
    return len(slices) if _device_count() else 0


def _device_count() -> int:
    return _ask(lambda nvml: int(nvml.nvmlDeviceGetCount()), 0)


def _uuids() -> list[str]:
    """The UUID of every GPU, in NVML's order."""

    def question(nvml: Any) -> list[str]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]

    return _ask(question, [])


def _ask(question: Callable[[Any], T], otherwise: T) -> T:
    """One question to NVML, opened for it and closed again."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver, no permission: no device for us
        return otherwise
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return otherwise
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    # nvidia-ml-py before 11.525 gives bytes.
    return value.decode() if isinstance(value, bytes) else value
