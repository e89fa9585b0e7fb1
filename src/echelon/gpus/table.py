"""For a person at a terminal: GPUs as rows with bars, their processes under them, as wide as it is.

A line is a list of pieces of text with their styles. rich would do it too, but importing it takes
longer than the whole look, and drawing with it twice a second takes more than the looking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.gpus import words
from echelon.gpus.layout import Layout, Line, fitted
from echelon.gpus.snapshot import Gpu, Node, Process, Slice
from echelon.utils.text import truncate_text

STYLES = {
    **{"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"blue": "34", "cyan": "36", "bold red": "1;31", "bold cyan": "1;36"},
}
_HOT_C, _WARM_C = 85, 75


def painted(line: Line, colour: bool) -> str:
    if not colour:
        return "".join(text for text, _ in line).rstrip()
    return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


def table(nodes: Sequence[Node], width: int, me: str = "", clock: str = "") -> list[Line]:
    """`me`: whose processes stand out."""
    lines: list[Line] = []
    layout = fitted(nodes, width)
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
    if sum(len(text) for text, _ in line) <= width:
        return line
    clipped: Line = []
    left = width - 1
    for text, style in line:
        clipped.append((text[:left], style))
        left = max(0, left - len(text))
    return [*clipped, ("…", "")]


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
    return truncate_text(text, max(1, width))


# --- rows ---


def _of_gpu(gpu: Gpu, layout: Layout, me: str) -> Iterator[Line]:
    yield _gpu_row(gpu, layout)
    indent = " " * (layout.number + 2)
    if not gpu.processes_told:
        yield [
            (
                truncate_text(f"{indent}processes are not told: no permission", layout.width),
                "yellow",
            )
        ]
    for process in gpu.processes:
        yield _process_row(process, layout, me)
    for part in gpu.slices:
        yield _slice_row(part, layout)
        for process in part.processes:
            yield _process_row(process, layout, me)


def _gpu_row(gpu: Gpu, layout: Layout) -> Line:
    index = (f"{gpu.index:>{layout.number}}", "bold cyan")
    name = truncate_text(words.model(gpu.name), layout.model or 1)
    if gpu.fault:
        before = f"  {name:<{layout.model}}" if layout.model else ""
        room = layout.width - layout.number - len(before)
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


def _slice_row(part: Slice, layout: Layout) -> Line:
    """Its memory stands under the GPU's."""
    bars = 2 * (layout.bar + 1) if layout.bar else 0
    until = layout.number + layout.model + 2 * bool(layout.model) + 2 + layout.use + 2 + bars
    name = f"  MIG {part.index}  {words.slice_model(part.name)}"
    name = name if len(name) < until - layout.number else f"  MIG {part.index}"
    memory = words.memory(part.memory_used_bytes, part.memory_total_bytes)
    space = " " * layout.number
    return [
        (f"{space}{name:<{max(len(name) + 1, until - layout.number)}}", "cyan"),
        (f"{memory:>{layout.memory}}", ""),
    ]


def _process_row(process: Process, layout: Layout, me: str) -> Line:
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
