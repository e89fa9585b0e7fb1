"""For another program, such as grep: a line for each GPU and for each process, every one of which
says all that it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.gpus import formatting
from echelon.gpus.state import Gpu, GpuNode, GpuProcess


def render_plain_lines(nodes: Sequence[GpuNode]) -> Iterator[str]:
    several = len(nodes) > 1
    for node in nodes:
        where = f"{node.host}  " if several else ""
        stale = f"  (seen {node.stale_s:.0f} s ago)" if node.stale_s is not None else ""
        if node.fault:
            yield f"{where or node.host + '  '}{node.fault}{stale}"
        widths = _measure_widths(node)
        for gpu in node.gpus:
            yield f"{where}{_render_gpu_line(gpu)}{stale}"
            for process in gpu.processes:
                yield f"{where}GPU {gpu.index}  {_render_process_line(process, widths)}"
            for part in gpu.slices:
                name = f"GPU {gpu.index} MIG {part.index}"
                used = formatting.format_memory_use(part.memory_used_bytes, part.memory_total_bytes)
                yield f"{where}{name}  {formatting.shorten_slice_name(part.name)}  memory {used}"
                for process in part.processes:
                    yield f"{where}{name}  {_render_process_line(process, widths)}"


def _render_gpu_line(gpu: Gpu) -> str:
    name = f"GPU {gpu.index}  {gpu.name or formatting.MISSING}"
    if gpu.fault:
        return f"{name}  {gpu.fault}"
    parts = [
        f"use {formatting.format_percent(gpu.use_percent)}",
        f"memory {formatting.format_memory_use(gpu.memory_used_bytes, gpu.memory_total_bytes)}",
        f"temperature {formatting.format_temperature(gpu.temperature_c)}",
        f"power {formatting.format_power(gpu)}",
        *([f"fan {gpu.fan_percent}%"] if gpu.fan_percent is not None else []),
        *(["idle"] if gpu.idle else []),
        *([] if gpu.processes_told else ["processes not told (no permission)"]),
    ]
    return "  ".join([name, *parts])


def _measure_widths(node: GpuNode) -> tuple[int, int, int]:
    everyone = [process for gpu in node.gpus for process in gpu.list_all_processes()]
    return (
        max((len(formatting.format_pid(p)) for p in everyone), default=0),
        max((len(formatting.format_user(p)) for p in everyone), default=0),
        max((len(formatting.format_memory_size(p.memory_bytes)) for p in everyone), default=0),
    )


def _render_process_line(process: GpuProcess, widths: tuple[int, int, int]) -> str:
    pid, user, memory = widths
    parts = [
        f"pid {formatting.format_pid(process):<{pid}}",
        f"{formatting.format_user(process):<{user}}",
        f"{formatting.format_memory_size(process.memory_bytes):>{memory}}",
        f"{formatting.format_age(process):>5}",
        *([f"job {process.job}"] if process.job else []),
        *([f"run {process.run}"] if process.run else []),
        formatting.format_command(process),
    ]
    return "  ".join(parts)
