"""For a person at a terminal: GPUs as rows with bars, their processes under them, as wide as it is.

A line is a list of pieces of text with their styles. rich would do it too, but importing it takes
longer than the whole look, and drawing with it twice a second takes more than the looking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.gpus import formatting
from echelon.gpus.state import Gpu, GpuNode, GpuProcess, MigSlice
from echelon.gpus.table_layout import GpuTableLayout, StyledLine, fit_layout
from echelon.utils.text import truncate_text

STYLES = {
    **{"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"blue": "34", "cyan": "36", "bold red": "1;31", "bold cyan": "1;36"},
}
_HOT_C, _WARM_C = 85, 75


def paint_line(line: StyledLine, colour: bool) -> str:
    if not colour:
        return "".join(text for text, _ in line).rstrip()
    return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


def render_gpu_table(
    nodes: Sequence[GpuNode], width: int, me: str = "", clock: str = ""
) -> list[StyledLine]:
    """`me`: whose processes stand out."""
    lines: list[StyledLine] = []
    layout = fit_layout(nodes, width)
    for node in nodes:
        if lines:
            lines.append([])
        lines.append(_render_heading(node, width, clock))
        if node.gpus:
            lines += layout.render_headers()
        for gpu in node.gpus:
            lines += _render_gpu(gpu, layout, me)
    return [_clip_line(line, width) for line in lines]


def _clip_line(line: StyledLine, width: int) -> StyledLine:
    """A line that wraps would push the rest off the screen."""
    if sum(len(text) for text, _ in line) <= width:
        return line
    clipped: StyledLine = []
    left = width - 1
    for text, style in line:
        clipped.append((text[:left], style))
        left = max(0, left - len(text))
    return [*clipped, ("…", "")]


def _render_heading(node: GpuNode, width: int, clock: str) -> StyledLine:
    if node.fault and not node.gpus:
        return [
            (node.host, "bold"),
            (_cut_text(f"  {node.fault}", width - len(node.host)), "yellow"),
        ]
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
        line.append((_cut_text(stale, width - len(node.host) - len(text)), "yellow"))
    elif clock and space > len(text):
        line.append((f"{clock:>{space - len(text) + len(clock)}}", "dim"))
    return line


def _cut_text(text: str, width: int) -> str:
    return truncate_text(text, max(1, width))


# --- rows ---


def _render_gpu(gpu: Gpu, layout: GpuTableLayout, me: str) -> Iterator[StyledLine]:
    yield _render_gpu_row(gpu, layout)
    indent = " " * (layout.number + 2)
    if not gpu.processes_told:
        yield [
            (
                truncate_text(f"{indent}processes are not told: no permission", layout.width),
                "yellow",
            )
        ]
    for process in gpu.processes:
        yield _render_process_row(process, layout, me)
    for part in gpu.slices:
        yield _render_slice_row(part, layout)
        for process in part.processes:
            yield _render_process_row(process, layout, me)


def _render_gpu_row(gpu: Gpu, layout: GpuTableLayout) -> StyledLine:
    index = (f"{gpu.index:>{layout.number}}", "bold cyan")
    name = truncate_text(formatting.shorten_model_name(gpu.name), layout.model or 1)
    if gpu.fault:
        before = f"  {name:<{layout.model}}" if layout.model else ""
        room = layout.width - layout.number - len(before)
        return [index, (before, ""), (_cut_text(f"  {gpu.fault}", room), "bold red")]
    line: StyledLine = [index]
    if layout.model:
        line.append((f"  {name:<{layout.model}}", "dim" if gpu.idle else ""))
    line += [("  ", ""), *_render_bar(gpu.use_percent, layout.bar, "green")]
    line.append((f"{formatting.format_percent(gpu.use_percent):>{layout.use}}", ""))
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    line += [("  ", ""), *_render_bar(_compute_percent(used, total), layout.bar, "blue")]
    line.append((f"{formatting.format_memory_use(used, total):>{layout.memory}}", ""))
    temperature = formatting.format_temperature(gpu.temperature_c)
    line.append(
        (f"  {temperature:>{layout.temperature}}", _choose_temperature_style(gpu.temperature_c))
    )
    if layout.power:
        line.append((f"  {formatting.format_power(gpu):>{layout.power}}", ""))
    if layout.fan:
        line.append((f"  {formatting.format_percent(gpu.fan_percent):>{layout.fan}}", ""))
    return line


def _render_slice_row(part: MigSlice, layout: GpuTableLayout) -> StyledLine:
    """Its memory stands under the GPU's."""
    bars = 2 * (layout.bar + 1) if layout.bar else 0
    until = layout.number + layout.model + 2 * bool(layout.model) + 2 + layout.use + 2 + bars
    name = f"  MIG {part.index}  {formatting.shorten_slice_name(part.name)}"
    name = name if len(name) < until - layout.number else f"  MIG {part.index}"
    memory = formatting.format_memory_use(part.memory_used_bytes, part.memory_total_bytes)
    space = " " * layout.number
    return [
        (f"{space}{name:<{max(len(name) + 1, until - layout.number)}}", "cyan"),
        (f"{memory:>{layout.memory}}", ""),
    ]


def _render_process_row(process: GpuProcess, layout: GpuTableLayout, me: str) -> StyledLine:
    cells = (
        formatting.format_pid(process),
        formatting.format_user(process),
        formatting.format_memory_size(process.memory_bytes),
        formatting.format_age(process),
        process.job or "",
        process.run or "",
        formatting.format_command(process),
    )
    style = "red" if process.orphan else "bold" if me and process.user == me else ""
    return [(layout.render_process_row(cells), style)]


def _render_bar(percent: float | None, width: int, style: str) -> StyledLine:
    if not width:
        return []
    full = 0 if percent is None else round(width * min(100.0, percent) / 100)
    full = max(full, 1) if percent and percent >= 1 else full
    return [("━" * full, style), ("─" * (width - full), "dim"), (" ", "")]


def _compute_percent(used: int | None, total: int | None) -> float | None:
    return 100 * used / total if used is not None and total else None


def _choose_temperature_style(celsius: int | None) -> str:
    if celsius is None or celsius < _WARM_C:
        return ""
    return "red" if celsius >= _HOT_C else "yellow"
