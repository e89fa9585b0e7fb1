"""GPU values as short text, and whole lines for a pipe.

A value that a GPU does not report is a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.gpus.probe import Gpu, GpuNode, GpuProcess
from echelon.utils.text import format_duration

MISSING = "–"
"""A value that the GPU does not report."""
UNKNOWN = "?"
"""A property of a process that cannot be read from here."""


def format_gib(size_bytes: int | None) -> str:
    """Return GiB with two or three significant digits: ``0.48``, ``61.2``, ``140``."""
    if size_bytes is None:
        return MISSING
    value = size_bytes / (1 << 30)
    return (
        f"{value:.2f}" if 0 < value < 0.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    )


def format_memory_size(size_bytes: int | None) -> str:
    """Return ``61.2 GiB``."""
    return MISSING if size_bytes is None else f"{format_gib(size_bytes)} GiB"


def format_memory_use(used_bytes: int | None, total_bytes: int | None) -> str:
    """Return ``61.2/140 GiB``."""
    if used_bytes is None and total_bytes is None:
        return MISSING
    return f"{format_gib(used_bytes)}/{format_gib(total_bytes)} GiB"


def format_percent(value: int | None) -> str:
    """Return ``97%``."""
    return MISSING if value is None else f"{value}%"


def format_temperature(celsius: int | None) -> str:
    """Return ``64°C``."""
    return MISSING if celsius is None else f"{celsius}°C"


def format_power(gpu: Gpu) -> str:
    """Return draw and limit: ``612/700 W``."""
    if gpu.power_w is None:
        return MISSING
    limit = "" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}"
    return f"{gpu.power_w:.0f}{limit} W"


def shorten_model_name(name: str | None) -> str:
    """Return ``H200`` for ``NVIDIA H200``: the maker is the same for all."""
    return (name or MISSING).removeprefix("NVIDIA ")


def shorten_slice_name(name: str | None) -> str:
    """Return ``3g.71gb`` for ``NVIDIA H200 MIG 3g.71gb``."""
    return (name or MISSING).rpartition("MIG ")[2]


def format_pid(process: GpuProcess) -> str:
    """Return the PID, or ``?`` for a process outside of this container."""
    return UNKNOWN if process.pid is None else str(process.pid)


def format_user(process: GpuProcess) -> str:
    """Return the user's name, or ``?``."""
    return process.user or UNKNOWN


def format_process_age(process: GpuProcess) -> str:
    """Return the time since the process started: ``3h05m``."""
    return UNKNOWN if process.age_s is None else format_duration(process.age_s)


def format_command(process: GpuProcess) -> str:
    """Return the command line, marked if the run of the process is over."""
    if process.pid is None:
        return "a process that is not visible from here"
    orphan = "orphan: " if process.orphan else ""
    return orphan + (process.command or UNKNOWN)


# --- lines for a pipe: each stands alone, so that grep finds all there is about a process ---


def render_plain_lines(nodes: Sequence[GpuNode]) -> Iterator[str]:
    """Yield a line for each GPU, slice and process; of several nodes each begins with its host."""
    for node in nodes:
        host = f"{node.host}  " if len(nodes) > 1 else ""
        stale = f"  (seen {node.stale_s:.0f} s ago)" if node.stale_s is not None else ""
        if node.fault:
            yield f"{node.host}  {node.fault}{stale}"
        widths = _measure_widths(node)
        for gpu in node.gpus:
            yield f"{host}{_render_gpu_line(gpu)}{stale}"
            for process in gpu.processes:
                yield f"{host}GPU {gpu.index}  {_render_process_line(process, widths)}"
            for part in gpu.slices:
                name = f"GPU {gpu.index} MIG {part.index}"
                memory = format_memory_use(part.memory_used_bytes, part.memory_total_bytes)
                yield f"{host}{name}  {shorten_slice_name(part.name)}  memory {memory}"
                for process in part.processes:
                    yield f"{host}{name}  {_render_process_line(process, widths)}"


def _render_gpu_line(gpu: Gpu) -> str:
    name = f"GPU {gpu.index}  {gpu.name or MISSING}"
    if gpu.fault:
        return f"{name}  {gpu.fault}"
    cells = [
        f"use {format_percent(gpu.use_percent)}",
        f"memory {format_memory_use(gpu.memory_used_bytes, gpu.memory_total_bytes)}",
        f"temperature {format_temperature(gpu.temperature_c)}",
        f"power {format_power(gpu)}",
        *([f"fan {gpu.fan_percent}%"] if gpu.fan_percent is not None else []),
        *(["idle"] if gpu.idle else []),
        *([] if gpu.has_process_list else ["processes not listed (no permission)"]),
    ]
    return "  ".join([name, *cells])


def _measure_widths(node: GpuNode) -> tuple[int, int, int]:
    """Return the widths of PID, user and memory, so that the processes of a node align."""
    processes = [process for gpu in node.gpus for process in gpu.list_all_processes()]
    return (
        max((len(format_pid(p)) for p in processes), default=0),
        max((len(format_user(p)) for p in processes), default=0),
        max((len(format_memory_size(p.memory_bytes)) for p in processes), default=0),
    )


def _render_process_line(process: GpuProcess, widths: tuple[int, int, int]) -> str:
    pid_width, user_width, memory_width = widths
    cells = [
        f"pid {format_pid(process):<{pid_width}}",
        f"{format_user(process):<{user_width}}",
        f"{format_memory_size(process.memory_bytes):>{memory_width}}",
        f"{format_process_age(process):>5}",
        *([f"job {process.job}"] if process.job else []),
        *([f"run {process.run}"] if process.run else []),
        format_command(process),
    ]
    return "  ".join(cells)
