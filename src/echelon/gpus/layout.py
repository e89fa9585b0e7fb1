"""How wide everything is: what fits a terminal is chosen once for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.gpus import words
from echelon.gpus.snapshot import Node, Process
from echelon.utils.text import truncate_text

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""

_BARS = (24, 16, 12, 8, 0)
_LEAST_COMMAND = 8


class Layout(NamedTuple):
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

    def titles(self) -> list[Line]:
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
        return [[(first, "dim")], [(self.row(names), "dim")]]

    def row(self, cells: Sequence[str]) -> str:
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


def fitted(nodes: Sequence[Node], width: int) -> Layout:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    everyone = [process for gpu in gpus for process in gpu.everyone()]
    index = max([3, *(len(str(gpu.index)) for gpu in gpus)])
    memories = [words.memory(g.memory_used_bytes, g.memory_total_bytes) for g in gpus]
    memories += [
        words.memory(s.memory_used_bytes, s.memory_total_bytes) for g in gpus for s in g.slices
    ]
    fixed = {
        "number": index,
        "use": max([3, *(len(words.percent(g.use_percent)) for g in gpus)]),
        "memory": max([6, *map(len, memories)]),
        "temperature": max([4, *(len(words.temperature(g.temperature_c)) for g in gpus)]),
    }
    optional = {
        "model": max([4, *(len(words.model(g.name)) for g in gpus)]),
        "power": max([5, *(len(words.power(g)) for g in gpus)]),
        "fan": 4 if any(g.fan_percent is not None for g in gpus) else 0,
    }
    chosen = _fit_gpus(fixed, optional, width)
    return Layout(width=width, **fixed, **chosen, **_fit_processes(everyone, width - index - 2))


def _fit_gpus(fixed: dict[str, int], optional: dict[str, int], width: int) -> dict[str, int]:
    """First shorter bars, then without fan, name and power."""
    kept = dict(optional)
    for leave in (None, "fan", "model", "power"):
        if leave:
            kept[leave] = 0
        for bar in _BARS:
            columns = [w for w in (*fixed.values(), *kept.values()) if w]
            needed = sum(columns) + 2 * (len(columns) - 1) + (2 * (bar + 1) if bar else 0)
            if needed <= width:
                return kept | {"bar": bar}
    return kept | {"bar": 0}


def _fit_processes(everyone: Sequence[Process], width: int) -> dict[str, int]:
    """The command has what is left; where that is too little, the run, the job and the age go."""
    if not everyone:
        return dict.fromkeys(("pid", "user", "own", "age", "job", "run", "command"), 0)
    widths = {
        "pid": max([3, *(len(words.pid(p)) for p in everyone)]),
        "user": min(16, max([4, *(len(words.user(p)) for p in everyone)])),
        "own": max([6, *(len(words.with_unit(p.memory_bytes)) for p in everyone)]),
        "age": max([3, *(len(words.age(p)) for p in everyone)]),
        "job": max(3, *(len(p.job) for p in everyone if p.job))
        if any(p.job for p in everyone)
        else 0,
        "run": _run_width(everyone, width),
    }
    for leave in (None, "run", "job", "age"):
        if leave:
            widths[leave] = 0
        rest = width - sum(w + 2 for w in widths.values() if w)
        if rest >= (_LEAST_COMMAND if leave == "age" else 2 * _LEAST_COMMAND):
            break
    return widths | {"command": rest if rest >= _LEAST_COMMAND else 0}


def _run_width(everyone: Sequence[Process], width: int) -> int:
    longest = max((len(p.run or "") for p in everyone), default=0)
    return min(max(3, longest), max(16, width // 4)) if longest else 0
