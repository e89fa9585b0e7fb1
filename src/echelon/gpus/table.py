"""For a person at a terminal: GPUs as rows with bars, their processes under them, as wide as it is.

A line is a list of pieces of text with their styles. rich would do it too, but importing it takes
longer than the whole look, and drawing with it twice a second takes more than the looking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.gpus import words
from echelon.gpus.snapshot import Gpu, Node, Process, Slice
from echelon.letters import cut

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""

STYLES = {
    **{"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"blue": "34", "cyan": "36", "bold red": "1;31", "bold cyan": "1;36"},
}
_BARS = (24, 16, 12, 8, 0)
_HOT_C, _WARM_C = 85, 75
_LEAST_COMMAND = 8


def painted(line: Line, colour: bool) -> str:
    if not colour:
        return "".join(text for text, _ in line).rstrip()
    return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


def table(nodes: Sequence[Node], width: int, me: str = "", clock: str = "") -> list[Line]:
    """`me`: whose processes stand out."""
    lines: list[Line] = []
    layout = _layout(nodes, width)
    for node in nodes:
        if lines:
            lines.append([])
        lines.append(_heading(node, width, clock))
        if node.gpus:
            lines += layout.titles()
        for gpu in node.gpus:
            lines += _of_gpu(gpu, layout, me)
    return [_clipped(line, width) for line in lines]


def _clipped(line: Line, width: int) -> Line:
    """A line that wraps would push the rest off the screen."""
    clipped: Line = []
    for text, style in line:
        clipped.append((text[:width], style))
        width = max(0, width - len(text))
    return clipped


def _heading(node: Node, width: int, clock: str) -> Line:
    if node.fault and not node.gpus:
        return [(node.host, "bold"), (_cut(f"  {node.fault}", width - len(node.host)), "yellow")]
    idle = sum(gpu.idle for gpu in node.gpus)
    count = len(node.gpus)
    facts = [f"{count} GPU{'s' * (count != 1)}, {idle} idle"]
    facts += [f"driver {node.driver}"] * bool(node.driver) + [f"CUDA {node.cuda}"] * bool(node.cuda)
    stale = node.stale_s is not None and f" · seen {node.stale_s:.0f} s ago: {node.fault}"
    text = "".join(f" · {fact}" for fact in facts)
    space = width - len(node.host) - len(stale or "") - len(clock)
    while len(text) > space and facts:
        facts.pop()
        text = "".join(f" · {fact}" for fact in facts)
    line = [(node.host, "bold"), (text, "dim")]
    if stale:
        line.append((_cut(stale, width - len(node.host) - len(text)), "yellow"))
    elif clock and space > len(text):
        line.append((f"{clock:>{space - len(text) + len(clock)}}", "dim"))
    return line


def _cut(text: str, width: int) -> str:
    return cut(text, max(1, width))


# --- how wide everything is ---


@dataclass(frozen=True)
class _Layout:
    """Widths of what all GPUs and processes shown have in common; 0 leaves a column out."""

    width: int
    index: int
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
            (f"{'GPU':>{self.index}}", self.index),
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
            f"{cut(cell, w):>{w}}" if number in (0, 2, 3) else f"{cut(cell, w):<{w}}"
            for number, (cell, w) in enumerate(zip(cells, widths, strict=True))
            if w
        ]
        return (" " * (self.index + 2) + "  ".join(shown)).rstrip()


def _layout(nodes: Sequence[Node], width: int) -> _Layout:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    everyone = [process for gpu in gpus for process in gpu.everyone()]
    index = max([3, *(len(str(gpu.index)) for gpu in gpus)])
    memories = [words.memory(g.memory_used_bytes, g.memory_total_bytes) for g in gpus]
    memories += [
        words.memory(s.memory_used_bytes, s.memory_total_bytes) for g in gpus for s in g.slices
    ]
    fixed = {
        "index": index,
        "use": max([3, *(len(words.percent(g.use_percent)) for g in gpus)]),
        "memory": max([6, *map(len, memories)]),
        "temperature": max([4, *(len(words.temperature(g.temperature_c)) for g in gpus)]),
    }
    optional = {
        "model": max([4, *(len(words.model(g.name)) for g in gpus)]),
        "power": max([5, *(len(words.power(g)) for g in gpus)]),
        "fan": 4 if any(g.fan_percent is not None for g in gpus) else 0,
    }
    fitted = _fit_gpus(fixed, optional, width)
    return _Layout(width=width, **fixed, **fitted, **_fit_processes(everyone, width - index - 2))


def _fit_gpus(fixed: dict[str, int], optional: dict[str, int], width: int) -> dict[str, int]:
    """First shorter bars, then without fan, name and power."""
    kept = dict(optional)
    for leave in (None, "fan", "model", "power"):
        if leave:
            kept[leave] = 0
        for bar in _BARS:
            columns = [w for w in (*fixed.values(), *kept.values()) if w]
            needed = sum(columns) + 2 * (len(columns) - 1) + (2 * (bar + 1) if bar else 0)
            enough = bar >= 8 or leave is not None or bar == 0
            if needed <= width and enough:
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


# --- rows ---


def _of_gpu(gpu: Gpu, layout: _Layout, me: str) -> Iterator[Line]:
    yield _gpu_row(gpu, layout)
    indent = " " * (layout.index + 2)
    if not gpu.processes_told:
        yield [(cut(f"{indent}processes are not told: no permission", layout.width), "yellow")]
    for process in gpu.processes:
        yield _process_row(process, layout, me)
    for part in gpu.slices:
        yield _slice_row(part, layout)
        for process in part.processes:
            yield _process_row(process, layout, me)


def _gpu_row(gpu: Gpu, layout: _Layout) -> Line:
    index = (f"{gpu.index:>{layout.index}}", "bold cyan")
    name = cut(words.model(gpu.name), layout.model or 1)
    if gpu.fault:
        before = f"  {name:<{layout.model}}" if layout.model else ""
        room = layout.width - layout.index - len(before)
        return [index, (before, ""), (_cut(f"  {gpu.fault}", room), "bold red")]
    line: Line = [index]
    if layout.model:
        line.append((f"  {name:<{layout.model}}", "dim" if gpu.idle else ""))
    line += [("  ", ""), *_bar(gpu.use_percent, layout.bar, "green")]
    line.append((f"{words.percent(gpu.use_percent):>{layout.use}}", ""))
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    line += [("  ", ""), *_bar(_part(used, total), layout.bar, "blue")]
    line.append((f"{words.memory(used, total):>{layout.memory}}", ""))
    temperature = words.temperature(gpu.temperature_c)
    line.append((f"  {temperature:>{layout.temperature}}", _warmth(gpu.temperature_c)))
    if layout.power:
        line.append((f"  {words.power(gpu):>{layout.power}}", ""))
    if layout.fan:
        line.append((f"  {words.percent(gpu.fan_percent):>{layout.fan}}", ""))
    return line


def _slice_row(part: Slice, layout: _Layout) -> Line:
    """Its memory stands under the GPU's."""
    bars = 2 * (layout.bar + 1) if layout.bar else 0
    until = layout.index + layout.model + 2 * bool(layout.model) + 2 + layout.use + 2 + bars
    name = f"  MIG {part.index}  {words.slice_model(part.name)}"
    name = name if len(name) < until - layout.index else f"  MIG {part.index}"
    memory = words.memory(part.memory_used_bytes, part.memory_total_bytes)
    space = " " * layout.index
    return [
        (f"{space}{name:<{max(len(name) + 1, until - layout.index)}}", "cyan"),
        (f"{memory:>{layout.memory}}", ""),
    ]


def _process_row(process: Process, layout: _Layout, me: str) -> Line:
    cells = (
        words.pid(process),
        words.user(process),
        words.with_unit(process.memory_bytes),
        words.age(process),
        process.job or "",
        process.run or "",
        words.command(process),
    )
    style = "red" if process.orphan else "bold" if me and process.user == me else ""
    return [(layout.row(cells), style)]


def _bar(percent: float | None, width: int, style: str) -> Line:
    if not width:
        return []
    full = 0 if percent is None else round(width * min(100.0, percent) / 100)
    full = max(full, 1) if percent and percent >= 1 else full
    return [("━" * full, style), ("─" * (width - full), "dim"), (" ", "")]


def _part(used: int | None, total: int | None) -> float | None:
    return 100 * used / total if used is not None and total else None


def _warmth(celsius: int | None) -> str:
    if celsius is None or celsius < _WARM_C:
        return ""
    return "red" if celsius >= _HOT_C else "yellow"
