"""How wide everything is: what fits a terminal is chosen once for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.gpus import formatting
from echelon.gpus.state import GpuNode, GpuProcess
from echelon.utils.text import truncate_text

StyledLine = list[tuple[str, str]]
"""Pieces of text, each with its style."""

_BAR_WIDTHS = (24, 16, 12, 8, 0)
_MIN_COMMAND_WIDTH = 8


class GpuTableLayout(NamedTuple):
    """Widths of what all GPUs and processes shown have in common; 0 leaves a column out."""

    width: int
    number: int
    """The column of the GPU's own."""
    model: int
    bar: int
    use: int
    memory: int
    temperature: int
    power: int
    fan: int
    pid: int
    user: int
    own: int
    """The memory of a process."""
    age: int
    job: int
    run: int
    command: int

    def render_headers(self) -> list[StyledLine]:
        bar = self.bar + 1 if self.bar else 0
        cells = [
            (f"{'GPU':>{self.number}}", self.number),
            (f"{'NAME':<{self.model}}", self.model),
            (f"{'USE':<{bar + self.use}}" if bar else f"{'USE':>{self.use}}", self.use),
            (f"{'MEMORY':<{bar + self.memory}}" if bar else f"{'MEMORY':>{self.memory}}", 1),
            (f"{'TEMP':>{self.temperature}}", self.temperature),
            (f"{'POWER':>{self.power}}", self.power),
            (f"{'FAN':>{self.fan}}", self.fan),
        ]
        first = "  ".join(text for text, kept in cells if kept)
        if not self.pid:
            return [[(first, "dim")]]
        names = ("PID", "USER", "MEMORY", "AGE", "JOB", "RUN", "COMMAND")
        return [[(first, "dim")], [(self.render_process_row(names), "dim")]]

    def render_process_row(self, cells: Sequence[str]) -> str:
        """Of a process: numbers to the right, words to the left."""
        widths = (self.pid, self.user, self.own, self.age, self.job, self.run, self.command)
        shown = [
            f"{truncate_text(cell, w):>{w}}"
            if number in (0, 2, 3)
            else f"{truncate_text(cell, w):<{w}}"
            for number, (cell, w) in enumerate(zip(cells, widths, strict=True))
            if w
        ]
        return (" " * (self.number + 2) + "  ".join(shown)).rstrip()


def fit_layout(nodes: Sequence[GpuNode], width: int) -> GpuTableLayout:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    everyone = [process for gpu in gpus for process in gpu.list_all_processes()]
    index = max([3, *(len(str(gpu.index)) for gpu in gpus)])
    memories = [
        formatting.format_memory_use(g.memory_used_bytes, g.memory_total_bytes) for g in gpus
    ]
    memories += [
        formatting.format_memory_use(s.memory_used_bytes, s.memory_total_bytes)
        for g in gpus
        for s in g.slices
    ]
    fixed = {
        "number": index,
        "use": max([3, *(len(formatting.format_percent(g.use_percent)) for g in gpus)]),
        "memory": max([6, *map(len, memories)]),
        "temperature": max(
            [4, *(len(formatting.format_temperature(g.temperature_c)) for g in gpus)]
        ),
    }
    optional = {
        "model": max([4, *(len(formatting.shorten_model_name(g.name)) for g in gpus)]),
        "power": max([5, *(len(formatting.format_power(g)) for g in gpus)]),
        "fan": 4 if any(g.fan_percent is not None for g in gpus) else 0,
    }
    chosen = _fit_gpus(fixed, optional, width)
    return GpuTableLayout(
        width=width, **fixed, **chosen, **_fit_processes(everyone, width - index - 2)
    )


def _fit_gpus(fixed: dict[str, int], optional: dict[str, int], width: int) -> dict[str, int]:
    """First shorter bars, then without fan, name and power."""
    kept = dict(optional)
    for leave in (None, "fan", "model", "power"):
        if leave:
            kept[leave] = 0
        for bar in _BAR_WIDTHS:
            columns = [w for w in (*fixed.values(), *kept.values()) if w]
            needed = sum(columns) + 2 * (len(columns) - 1) + (2 * (bar + 1) if bar else 0)
            if needed <= width:
                return kept | {"bar": bar}
    return kept | {"bar": 0}


def _fit_processes(everyone: Sequence[GpuProcess], width: int) -> dict[str, int]:
    """The command has what is left; where that is too little, the run, the job and the age go."""
    if not everyone:
        return dict.fromkeys(("pid", "user", "own", "age", "job", "run", "command"), 0)
    widths = {
        "pid": max([3, *(len(formatting.format_pid(p)) for p in everyone)]),
        "user": min(16, max([4, *(len(formatting.format_user(p)) for p in everyone)])),
        "own": max([6, *(len(formatting.format_memory_size(p.memory_bytes)) for p in everyone)]),
        "age": max([3, *(len(formatting.format_age(p)) for p in everyone)]),
        "job": max(3, *(len(p.job) for p in everyone if p.job))
        if any(p.job for p in everyone)
        else 0,
        "run": _measure_run_width(everyone, width),
    }
    for leave in (None, "run", "job", "age"):
        if leave:
            widths[leave] = 0
        rest = width - sum(w + 2 for w in widths.values() if w)
        if rest >= (_MIN_COMMAND_WIDTH if leave == "age" else 2 * _MIN_COMMAND_WIDTH):
            break
    return widths | {"command": rest if rest >= _MIN_COMMAND_WIDTH else 0}


def _measure_run_width(everyone: Sequence[GpuProcess], width: int) -> int:
    longest = max((len(p.run or "") for p in everyone), default=0)
    return min(max(3, longest), max(16, width // 4)) if longest else 0
