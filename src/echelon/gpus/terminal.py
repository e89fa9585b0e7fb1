"""`echelon gpus` on a terminal: GPUs as rows with bars, their processes under them.

Three parts: a layout (which columns fit the width, chosen once for all rows), the table itself, and
a full screen that ``--watch`` redraws in place. rich could draw the same, but importing it takes
longer than reading the GPUs, and so does drawing with it twice a second.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from echelon.gpus import formatting
from echelon.gpus.probe import Gpu, GpuNode, GpuProcess, MigSlice
from echelon.utils.text import truncate_text

StyledLine = list[tuple[str, str]]
"""Pieces of text, each with a key of ANSI_STYLES."""
ANSI_STYLES = {
    **{"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"blue": "34", "cyan": "36", "bold red": "1;31", "bold cyan": "1;36"},
}
_HOT_C, _WARM_C = 85, 75
_BAR_WIDTHS = (24, 16, 12, 8, 0)
"""The widths to try, the best first."""
_MIN_COMMAND_WIDTH = 8
_MAX_USER_WIDTH = 16


# --- the layout ---


class GpuTableLayout(NamedTuple):
    """The widths of the columns, the same for all GPUs and processes; 0 leaves a column out."""

    width: int
    """Of the terminal."""
    # Of a GPU:
    number: int
    model: int
    bar: int
    use: int
    memory: int
    temperature: int
    power: int
    fan: int
    # Of a process:
    pid: int
    user: int
    process_memory: int
    age: int
    job: int
    run: int
    command: int

    def render_headers(self) -> list[StyledLine]:
        """Return the line over the GPUs and, if there are processes, the one over them."""
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
        gpu_header = "  ".join(text for text, width in cells if width)
        if not self.pid:
            return [[(gpu_header, "dim")]]
        names = ("PID", "USER", "MEMORY", "AGE", "JOB", "RUN", "COMMAND")
        return [[(gpu_header, "dim")], [(self.render_process_cells(names), "dim")]]

    def render_process_cells(self, cells: Sequence[str]) -> str:
        """Return a row of a process's seven columns: numbers to the right, text to the left."""
        widths = (
            *(self.pid, self.user, self.process_memory, self.age),
            *(self.job, self.run, self.command),
        )
        right_aligned = (0, 2, 3)
        shown = [
            f"{truncate_text(cell, width):{'>' if column in right_aligned else '<'}{width}}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
            if width
        ]
        return (" " * (self.number + 2) + "  ".join(shown)).rstrip()


def fit_layout(nodes: Sequence[GpuNode], width: int) -> GpuTableLayout:
    """Return the layout that shows as much as fits the width."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    processes = [process for gpu in gpus for process in gpu.list_all_processes()]
    number_width = max([3, *(len(str(gpu.index)) for gpu in gpus)])
    devices: list[Gpu | MigSlice] = [*gpus, *(part for gpu in gpus for part in gpu.slices)]
    memories = [
        formatting.format_memory_use(device.memory_used_bytes, device.memory_total_bytes)
        for device in devices
    ]
    fixed = {
        "number": number_width,
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
    return GpuTableLayout(
        width=width,
        **fixed,
        **_fit_gpu_columns(fixed, optional, width),
        **_fit_process_columns(processes, width - number_width - 2),
    )


def _fit_gpu_columns(fixed: dict[str, int], optional: dict[str, int], width: int) -> dict[str, int]:
    """Return the widths of optional columns and bars: bars shrink first, then columns go."""
    chosen = dict(optional)
    for dropped in (None, "fan", "model", "power"):
        if dropped:
            chosen[dropped] = 0
        for bar in _BAR_WIDTHS:
            columns = [w for w in (*fixed.values(), *chosen.values()) if w]
            needed = sum(columns) + 2 * (len(columns) - 1) + (2 * (bar + 1) if bar else 0)
            if needed <= width:
                return chosen | {"bar": bar}
    return chosen | {"bar": 0}


def _fit_process_columns(processes: Sequence[GpuProcess], width: int) -> dict[str, int]:
    """Return the widths of the process columns.

    The command gets the rest of the line. If that is too little, run, job and age are dropped.
    """
    columns = ("pid", "user", "process_memory", "age", "job", "run", "command")
    if not processes:
        return dict.fromkeys(columns, 0)
    memories = [formatting.format_memory_size(p.memory_bytes) for p in processes]
    jobs = [p.job for p in processes if p.job]
    widths = {
        "pid": max([3, *(len(formatting.format_pid(p)) for p in processes)]),
        "user": min(
            _MAX_USER_WIDTH, max([4, *(len(formatting.format_user(p)) for p in processes)])
        ),
        "process_memory": max([6, *map(len, memories)]),
        "age": max([3, *(len(formatting.format_process_age(p)) for p in processes)]),
        "job": max([3, *map(len, jobs)]) if jobs else 0,
        "run": _compute_run_column_width(processes, width),
    }
    for dropped in (None, "run", "job", "age"):
        if dropped:
            widths[dropped] = 0
        rest = width - sum(w + 2 for w in widths.values() if w)
        if rest >= (_MIN_COMMAND_WIDTH if dropped == "age" else 2 * _MIN_COMMAND_WIDTH):
            break
    return widths | {"command": rest if rest >= _MIN_COMMAND_WIDTH else 0}


def _compute_run_column_width(processes: Sequence[GpuProcess], width: int) -> int:
    longest = max((len(p.run or "") for p in processes), default=0)
    return min(max(3, longest), max(16, width // 4)) if longest else 0


# --- the table ---


def render_gpu_table(
    nodes: Sequence[GpuNode], width: int, highlighted_user: str = "", clock: str = ""
) -> list[StyledLine]:
    """Return the lines of the table, none longer than ``width``.

    The processes of ``highlighted_user`` are bold; ``clock`` stands at the right of each heading.
    """
    lines: list[StyledLine] = []
    layout = fit_layout(nodes, width)
    for node in nodes:
        if lines:
            lines.append([])
        lines.append(_render_heading(node, width, clock))
        if node.gpus:
            lines += layout.render_headers()
        for gpu in node.gpus:
            lines += _render_gpu(gpu, layout, highlighted_user)
    return [_clip_line(line, width) for line in lines]


def paint_line(line: StyledLine, use_colour: bool) -> str:
    """Return a line as text, with escape sequences for its styles if ``use_colour``."""
    if not use_colour:
        return "".join(text for text, _ in line).rstrip()
    return "".join(
        f"\x1b[{ANSI_STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line
    )


def _clip_line(line: StyledLine, width: int) -> StyledLine:
    """Return the line cut to the width: a line that wraps would push others off the screen."""
    if sum(len(text) for text, _ in line) <= width:
        return line
    clipped: StyledLine = []
    left = width - 1
    for text, style in line:
        clipped.append((text[:left], style))
        left = max(0, left - len(text))
    return [*clipped, ("…", "")]


def _truncate(text: str, width: int) -> str:
    return truncate_text(text, max(1, width))


def _render_heading(node: GpuNode, width: int, clock: str) -> StyledLine:
    """Return host, counts and versions; in a narrow terminal the versions are dropped first."""
    if node.fault and not node.gpus:
        fault = _truncate(f"  {node.fault}", width - len(node.host))
        return [(node.host, "bold"), (fault, "yellow")]
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
        line.append((_truncate(stale, width - len(node.host) - len(text)), "yellow"))
    elif clock and space > len(text):
        line.append((f"{clock:>{space - len(text) + len(clock)}}", "dim"))
    return line


def _render_gpu(gpu: Gpu, layout: GpuTableLayout, highlighted_user: str) -> Iterator[StyledLine]:
    yield _render_gpu_row(gpu, layout)
    if not gpu.has_process_list:
        note = " " * (layout.number + 2) + "processes are not listed: no permission"
        yield [(truncate_text(note, layout.width), "yellow")]
    for process in gpu.processes:
        yield _render_process_row(process, layout, highlighted_user)
    for part in gpu.slices:
        yield _render_slice_row(part, layout)
        for process in part.processes:
            yield _render_process_row(process, layout, highlighted_user)


def _render_gpu_row(gpu: Gpu, layout: GpuTableLayout) -> StyledLine:
    index = (f"{gpu.index:>{layout.number}}", "bold cyan")
    name = truncate_text(formatting.shorten_model_name(gpu.name), layout.model or 1)
    if gpu.fault:
        before = f"  {name:<{layout.model}}" if layout.model else ""
        space = layout.width - layout.number - len(before)
        return [index, (before, ""), (_truncate(f"  {gpu.fault}", space), "bold red")]
    line: StyledLine = [index]
    if layout.model:
        line.append((f"  {name:<{layout.model}}", "dim" if gpu.idle else ""))
    line += [("  ", ""), *_render_bar(gpu.use_percent, layout.bar, "green")]
    line.append((f"{formatting.format_percent(gpu.use_percent):>{layout.use}}", ""))
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    line += [("  ", ""), *_render_bar(_compute_percent(used, total), layout.bar, "blue")]
    line.append((f"{formatting.format_memory_use(used, total):>{layout.memory}}", ""))
    temperature = formatting.format_temperature(gpu.temperature_c)
    style = _choose_temperature_style(gpu.temperature_c)
    line.append((f"  {temperature:>{layout.temperature}}", style))
    if layout.power:
        line.append((f"  {formatting.format_power(gpu):>{layout.power}}", ""))
    if layout.fan:
        line.append((f"  {formatting.format_percent(gpu.fan_percent):>{layout.fan}}", ""))
    return line


def _render_slice_row(part: MigSlice, layout: GpuTableLayout) -> StyledLine:
    """Return the row of a slice, its memory under that of the GPU."""
    bars = 2 * (layout.bar + 1) if layout.bar else 0
    memory_column = layout.number + layout.model + 2 * bool(layout.model) + layout.use + 4 + bars
    space = memory_column - layout.number
    name = f"  MIG {part.index}  {formatting.shorten_slice_name(part.name)}"
    name = name if len(name) < space else f"  MIG {part.index}"
    memory = formatting.format_memory_use(part.memory_used_bytes, part.memory_total_bytes)
    return [
        (f"{' ' * layout.number}{name:<{max(len(name) + 1, space)}}", "cyan"),
        (f"{memory:>{layout.memory}}", ""),
    ]


def _render_process_row(
    process: GpuProcess, layout: GpuTableLayout, highlighted_user: str
) -> StyledLine:
    cells = (
        formatting.format_pid(process),
        formatting.format_user(process),
        formatting.format_memory_size(process.memory_bytes),
        formatting.format_process_age(process),
        process.job or "",
        process.run or "",
        formatting.format_command(process),
    )
    is_highlighted = bool(highlighted_user) and process.user == highlighted_user
    style = "red" if process.orphan else "bold" if is_highlighted else ""
    return [(layout.render_process_cells(cells), style)]


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


# --- the full screen ---

# Escape sequences: the alternate screen, no cursor, no line wrapping; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
# Synchronized output: terminals that know it show everything between the two at once.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_STYLE_SEQUENCE = re.compile(r"\x1b\[[\d;]*m")


class ScreenRenderer:
    """A terminal that is redrawn in place.

    Only changed lines are sent, so nothing flickers and a slow connection keeps up.
    """

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._size = (0, 0)

    def invalidate(self) -> None:
        """Draw everything the next time: the terminal shows something else by now."""
        self._size = (0, 0)

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines; if they are too many, the last line says how many are left out."""
        size = shutil.get_terminal_size()
        if size != self._size:  # the terminal has wrapped or cut what was drawn
            self._drawn, self._size = [], size
            sys.stdout.write("\x1b[2J")
        page = fit_to_height(lines, size.lines)
        changed = [
            f"\x1b[{number};1H{line}{_erase_rest(line, size.columns)}"
            for number, line in enumerate(page, 1)
            if number > len(self._drawn) or self._drawn[number - 1] != line
        ]
        if changed or len(page) < len(self._drawn):
            erase = f"\x1b[{len(page) + 1};1H\x1b[J" if len(page) < len(self._drawn) else ""
            sys.stdout.write(f"{_BEGIN}{''.join(changed)}{erase}{_END}")
            sys.stdout.flush()
        self._drawn = page


def _erase_rest(line: str, columns: int) -> str:
    """Return what erases the rest of a line; nothing for a full one.

    After a full line the cursor stands on its last character, which would be erased.
    """
    return "\x1b[K" if len(_STYLE_SEQUENCE.sub("", line)) < columns else ""


def fit_to_height(lines: Sequence[str], height: int) -> list[str]:
    """Return at most ``height`` lines, the last of which counts those left out."""
    if len(lines) <= height:
        return list(lines)
    hidden = len(lines) - height + 1
    return [*lines[: height - 1], f"… {hidden} more lines: --gpu or --user shows fewer"]


@contextmanager
def open_full_screen() -> Iterator[ScreenRenderer]:
    """Yield a screen to draw on. However it ends or is stopped, the terminal is restored."""
    terminal = ScreenRenderer()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def suspend(number: int, frame: FrameType | None) -> None:
        """Restore the terminal on Ctrl-Z and take it again on `fg`.

        Writes past Python's buffer, which the interrupted code may be using.
        """
        os.write(sys.stdout.fileno(), _LEAVE.encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        os.write(sys.stdout.fileno(), _ENTER.encode())
        terminal.invalidate()

    # SIGINT too: shells start background jobs with it ignored.
    handlers = (
        (signal.SIGINT, interrupt),
        (signal.SIGTERM, interrupt),
        (signal.SIGTSTP, suspend),
    )
    previous = {number: signal.signal(number, handler) for number, handler in handlers}
    sys.stdout.write(_ENTER)
    try:
        yield terminal
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
