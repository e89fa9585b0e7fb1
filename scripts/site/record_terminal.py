"""Record docs/pictures/terminal.svg: .venv/bin/python scripts/site/record_terminal.py

The commands run for real, in a terminal of their own, in an empty folder, and what they print is
kept with its times. Rank 1 is killed by this script while it trains. Only the typing is made up,
and pauses of more than a second are shortened. The animation is SVG alone: each line of the screen
is shown from when it was there to when it changed. Where nothing moves, the last screen is seen.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "pictures" / "terminal.svg"
COLUMNS, ROWS = 100, 22
TRAIN = (
    "echelon train run.name=a launch=local launch.procs=2 hidden=64 samples=32768 trainer.epochs=3"
)
COMMANDS = (TRAIN, "echelon show a | head -n 7")
_KILL_AFTER_S = 0.5
"""How long after the first epoch's evaluation rank 1 is killed."""
_TYPE_S, _LONGEST_PAUSE_S, _END_S = 0.035, 1.0, 6.0
_CELL, _LINE, _SIZE = 8.4, 19, 14
_COLOURS = {
    **{30: "#5c6370", 31: "#ff7b86", 32: "#8ccf7e", 33: "#e5c76b", 34: "#67b0e8"},
    **{35: "#c47fd5", 36: "#6cbfbf", 37: "#dadada", 90: "#7f8794"},
}
_SEQUENCE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>]")


class Cell(NamedTuple):
    """A character on the screen and how it looks."""

    character: str = " "
    colour: int = 0
    is_bold: bool = False
    is_dim: bool = False


class Screen:
    """As much of a terminal as our commands use: lines, colours, and a cursor that moves."""

    def __init__(self) -> None:
        self.rows = [[Cell()] * COLUMNS for _ in range(ROWS)]
        self.x = self.y = 0
        self.look = Cell()

    def feed(self, text: str) -> None:
        """Carry out what a program has written."""
        end = 0
        for found in _SEQUENCE.finditer(text):
            self._write(text[end : found.start()])
            end = found.end()
            if found[2]:
                self._control(found[1], found[2])
        self._write(text[end:])

    def _write(self, text: str) -> None:
        for character in text:
            if character == "\r":
                self.x = 0
            elif character == "\n":
                self._next_line()
            elif character == "\b":
                self.x = max(0, self.x - 1)
            elif character >= " ":
                if self.x == COLUMNS:
                    self.x = 0
                    self._next_line()
                self.rows[self.y][self.x] = self.look._replace(character=character)
                self.x += 1

    def _next_line(self) -> None:
        if self.y == ROWS - 1:
            self.rows = [*self.rows[1:], [Cell()] * COLUMNS]
        else:
            self.y += 1

    def _control(self, given: str, letter: str) -> None:
        numbers = [int(n) for n in given.split(";") if n.isdigit()]
        count = numbers[0] if numbers else 0
        if letter == "m":
            self._set_look(numbers or [0])
        elif letter == "K":
            start, stop = (0, COLUMNS) if count == 2 else (self.x, COLUMNS)
            self.rows[self.y][start:stop] = [Cell()] * (stop - start)
        elif letter in "AB":
            step = (count or 1) * (1 if letter == "B" else -1)
            self.y = min(ROWS - 1, max(0, self.y + step))
        elif letter == "C":
            self.x = min(COLUMNS - 1, self.x + (count or 1))
        elif letter == "G":
            self.x = (count or 1) - 1

    def _set_look(self, numbers: list[int]) -> None:
        if numbers[0] in (38, 48):  # one of 256 colours: none of ours
            return
        for number in numbers:
            if number == 0:
                self.look = Cell()
            elif number in (1, 22):
                self.look = self.look._replace(is_bold=number == 1, is_dim=False)
            elif number == 2:
                self.look = self.look._replace(is_dim=True)
            elif number in _COLOURS or number == 39:
                self.look = self.look._replace(colour=0 if number == 39 else number)

    def take(self) -> tuple[tuple[Cell, ...], ...]:
        """Return what is on the screen."""
        return tuple(map(tuple, self.rows))


def record(command: str, screen: Screen, kills: bool) -> Iterator[float]:
    """Run a command in a terminal; after each change of the screen, yield the seconds since its
    start."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execvp("bash", ["bash", "-c", command])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started = time.monotonic()
    kill_at = float("inf")
    seen = ""
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        now = time.monotonic()
        if now > kill_at:
            _kill_rank_1(child)
            kill_at = float("inf")
        if not ready:
            continue
        try:
            data = os.read(terminal, 65536).decode(errors="replace")
        except OSError:
            data = ""
        if not data:
            break
        seen += data
        if kills and "evaluated after step" in seen:
            kill_at, kills = now + _KILL_AFTER_S, False
        screen.feed(data)
        yield time.monotonic() - started
    os.waitpid(child, 0)


def _kill_rank_1(command: int) -> None:
    """Kill the younger of the two workers, which are the children of the fork server."""
    agent = psutil.Process(command)
    workers = [w for server in agent.children() for w in server.children()]
    if not workers:  # bash has a child of its own
        workers = [w for a in agent.children() for s in a.children() for w in s.children()]
    max(workers, key=lambda worker: worker.pid).send_signal(signal.SIGKILL)


def record_all(commands: tuple[str, ...]) -> list[tuple[float, tuple[tuple[Cell, ...], ...]]]:
    """Return the screens of all commands with their times, with the prompt and the typing."""
    screen, clock = Screen(), 0.0
    frames = []
    for command in commands:
        screen.feed("\x1b[32m$\x1b[0m ")
        frames.append((clock, screen.take()))
        for character in command:
            screen.feed(character)
            clock += _TYPE_S
            frames.append((clock, screen.take()))
        screen.feed("\r\n")
        clock += 0.3
        frames.append((clock, screen.take()))
        last = 0.0
        for moment in record(command, screen, kills=command == TRAIN):
            clock += min(moment - last, _LONGEST_PAUSE_S)
            last = moment
            if clock - frames[-1][0] < 0.1:  # no faster than is seen
                frames[-1] = (frames[-1][0], screen.take())
            else:
                frames.append((clock, screen.take()))
        clock += 1.0
    screen.feed("\x1b[32m$\x1b[0m ")
    frames.append((clock, screen.take()))
    return frames


def render(frames: list[tuple[float, tuple[tuple[Cell, ...], ...]]]) -> str:
    """Return the animation."""
    total = frames[-1][0] + _END_S
    width, height = COLUMNS * _CELL + 32, ROWS * _LINE + 56
    lines = []
    for row in range(ROWS):
        start, content = frames[0][0], frames[0][1][row]
        for moment, rows in [*frames[1:], (total, None)]:
            if rows is not None and rows[row] == content:
                continue
            if any(cell.character != " " for cell in content):
                lines.append(_render_line(row, content, start, moment, total))
            if rows is not None:
                start, content = moment, rows[row]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" '
            'aria-label="A training on two processes: one is killed and replaced" '
            f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" '
            f'font-size="{_SIZE}" xml:space="preserve">',
            '<rect width="100%" height="100%" rx="8" fill="#1a1d24"/>',
            *(
                f'<circle cx="{20 + i * 20}" cy="20" r="6" fill="{colour}"/>'
                for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
            ),
            f'<rect width="0" height="0"><animate id="l" attributeName="x" from="0" to="0" '
            f'begin="0s;l.end" dur="{total:.2f}s"/></rect>',
            *lines,
            "</svg>",
            "",
        ]
    )


def _render_line(
    row: int, content: tuple[Cell, ...], start: float, stop: float, total: float
) -> str:
    is_last = stop == total
    if is_last and start == 0:
        shown, timing = "visible", ""
    elif is_last:
        shown = "visible"
        timing = f'<set attributeName="visibility" to="hidden" begin="l.begin" dur="{start:.2f}s"/>'
    else:
        shown = "hidden"
        timing = (
            f'<set attributeName="visibility" to="visible" begin="l.begin+{start:.2f}s" '
            f'dur="{stop - start:.2f}s"/>'
        )
    spans = []
    cells = list(content)
    while cells and cells[-1].character == " ":
        cells.pop()
    x = 0
    while x < len(cells):
        end = x
        while end < len(cells) and cells[end][1:] == cells[x][1:]:
            end += 1
        text = "".join(cell.character for cell in cells[x:end])
        if text.strip():
            cell = cells[x]
            look = f' fill="{_COLOURS[cell.colour]}"' if cell.colour else ""
            look += ' font-weight="700"' if cell.is_bold else ""
            look += ' opacity=".65"' if cell.is_dim else ""
            spans.append(
                f'<tspan x="{16 + x * _CELL:g}" textLength="{(end - x) * _CELL:g}"{look}>'
                f"{escape(text)}</tspan>"
            )
        x = end
    y = 56 + row * _LINE
    return f'<text y="{y}" fill="#dadada" visibility="{shown}">{"".join(spans)}{timing}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET)
    target = parser.parse_args().target.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        recorded = record_all(COMMANDS)
        os.chdir(ROOT)
    target.write_text(render(recorded), encoding="utf-8")
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB, {recorded[-1][0]:.0f} s")
