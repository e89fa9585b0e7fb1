"""For another program, such as grep: a line for each GPU and for each process, every one of which
says all that it is about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.gpus import words
from echelon.gpus.snapshot import Gpu, Node, Process


def plain_lines(nodes: Sequence[Node]) -> Iterator[str]:
    several = len(nodes) > 1
    for node in nodes:
        where = f"{node.host}  " if several else ""
        stale = f"  (seen {node.stale_s:.0f} s ago)" if node.stale_s is not None else ""
        if node.fault:
            yield f"{where or node.host + '  '}{node.fault}{stale}"
        widths = _widths(node)
        for gpu in node.gpus:
            yield f"{where}{_gpu_line(gpu)}{stale}"
            for process in gpu.processes:
                yield f"{where}GPU {gpu.index}  {_process_line(process, widths)}"
            for part in gpu.slices:
                name = f"GPU {gpu.index} MIG {part.index}"
                used = words.memory(part.memory_used_bytes, part.memory_total_bytes)
                yield f"{where}{name}  {words.slice_model(part.name)}  memory {used}"
                for process in part.processes:
                    yield f"{where}{name}  {_process_line(process, widths)}"


def _gpu_line(gpu: Gpu) -> str:
    name = f"GPU {gpu.index}  {gpu.name or words.MISSING}"
    if gpu.fault:
        return f"{name}  {gpu.fault}"
    parts = [
        f"use {words.percent(gpu.use_percent)}",
        f"memory {words.memory(gpu.memory_used_bytes, gpu.memory_total_bytes)}",
        f"temperature {words.temperature(gpu.temperature_c)}",
        f"power {words.power(gpu)}",
        *([f"fan {gpu.fan_percent}%"] if gpu.fan_percent is not None else []),
        *(["idle"] if gpu.idle else []),
        *([] if gpu.processes_told else ["processes not told (no permission)"]),
    ]
    return "  ".join([name, *parts])


def _widths(node: Node) -> tuple[int, int, int]:
    everyone = [process for gpu in node.gpus for process in gpu.everyone()]
    return (
        max((len(words.pid(p)) for p in everyone), default=0),
        max((len(words.user(p)) for p in everyone), default=0),
        max((len(words.with_unit(p.memory_bytes)) for p in everyone), default=0),
    )


def _process_line(process: Process, widths: tuple[int, int, int]) -> str:
    pid, user, memory = widths
    parts = [
        f"pid {words.pid(process):<{pid}}",
        f"{words.user(process):<{user}}",
        f"{words.with_unit(process.memory_bytes):>{memory}}",
        f"{words.age(process):>5}",
        *([f"job {process.job}"] if process.job else []),
        *([f"run {process.run}"] if process.run else []),
        words.command(process),
    ]
    return "  ".join(parts)
