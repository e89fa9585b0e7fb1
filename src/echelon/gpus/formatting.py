"""Values in few letters. What is not known is a dash, never a nought."""

from __future__ import annotations

from echelon.gpus.state import Gpu, GpuProcess
from echelon.utils.text import format_duration

MISSING = "–"
UNKNOWN = "?"
"""Somebody there is, but who cannot be known."""


def format_gib(size: int | None) -> str:
    """Three figures at least: 0.48, 61.2, 140."""
    if size is None:
        return MISSING
    value = size / (1 << 30)
    return (
        f"{value:.2f}" if 0 < value < 0.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    )


def format_memory_size(size: int | None) -> str:
    return MISSING if size is None else f"{format_gib(size)} GiB"


def format_memory_use(used: int | None, total: int | None) -> str:
    return (
        MISSING if used is None and total is None else f"{format_gib(used)}/{format_gib(total)} GiB"
    )


def format_percent(value: int | None) -> str:
    return MISSING if value is None else f"{value}%"


def format_temperature(value: int | None) -> str:
    return MISSING if value is None else f"{value}°C"


def format_power(gpu: Gpu) -> str:
    if gpu.power_w is None:
        return MISSING
    limit = "" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}"
    return f"{gpu.power_w:.0f}{limit} W"


def shorten_model_name(name: str | None) -> str:
    """`NVIDIA` is on every one."""
    return (name or MISSING).removeprefix("NVIDIA ")


def shorten_slice_name(name: str | None) -> str:
    """`NVIDIA H200 MIG 3g.71gb` is 3g.71gb."""
    return (name or MISSING).rpartition("MIG ")[2]


def format_pid(process: GpuProcess) -> str:
    return UNKNOWN if process.pid is None else str(process.pid)


def format_user(process: GpuProcess) -> str:
    return process.user or UNKNOWN


def format_age(process: GpuProcess) -> str:
    return UNKNOWN if process.age_s is None else format_duration(process.age_s)


def format_command(process: GpuProcess) -> str:
    if process.pid is None:
        return "a process that cannot be seen from here"
    orphan = "orphan: " if process.orphan else ""
    return orphan + (process.command or UNKNOWN)
