"""Widgets made of lines, and text that is safe to show.

A terminal may be far away. So a widget compares each line with what is on the screen, and has only
those sent that differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\u2028\u2029\ufeff\ud800-\udfff]"
)
_RENDERER = Console(width=1000, color_system=None, legacy_windows=False)
DIM, BOLD = Style(dim=True), Style(bold=True)


def clean_text(text: str) -> str:
    """Return a text in one line, with nothing in it that moves a cursor or turns text around:
    control characters are shown as ``^X``."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(_describe_control, text.replace("\t", "    "))


def _describe_control(match: re.Match[str]) -> str:
    return "".join(
        f"^{chr(ord(sign) ^ 64)}" if ord(sign) < 128 and not sign.isprintable() else
        sign if sign.isprintable() else f"<{ord(sign):X}>"
        for sign in match[0]
    )  # fmt: skip


def clean_ansi(line: str) -> Text:
    """Return a line with the colours that its escapes ask for. All other escapes are shown."""
    if "\x1b" not in line:
        return Text(clean_text(line))
    parts, at = [], 0
    for match in _COLOUR.finditer(line):
        parts += [clean_text(line[at : match.start()]), match[0]]
        at = match.end()
    parts.append(clean_text(line[at:]))
    return Text.from_ansi("".join(parts))


def fit_text(text: str, width: int, is_right_aligned: bool = False) -> str:
    """Return a clean text in exactly ``width`` cells; an ellipsis replaces what was cut."""
    text = clean_text(text)
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * (width - size) + text if is_right_aligned else text + " " * (width - size)


def make_strip(line: Text | str | Sequence[Segment], style: Style | None = None) -> Strip:
    """Return a line as textual draws it."""
    if isinstance(line, str):
        return Strip([Segment(line, style)])
    if isinstance(line, Text):
        return Strip([Segment(s.text, s.style) for s in line.render(_RENDERER, end="")])
    return Strip(line)


class LinesWidget(Widget):
    """A widget whose lines are made anew as a whole and compared with those on the screen."""

    DEFAULT_CSS = "LinesWidget { height: 1fr; width: 1fr; }"

    class Resized(Message):
        """The widget has another size."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._strips: list[Strip] = []

    def make_lines(self, width: int, height: int) -> list[Strip]:
        """Return the lines for a size. For subclasses."""
        raise NotImplementedError

    def update_lines(self) -> None:
        """Make the lines anew and draw those that differ."""
        width, height = self.size
        if not width or not height:
            return
        made = [strip.crop(0, width) for strip in self.make_lines(width, height)[:height]]
        old, self._strips = self._strips, made
        blank = Strip.blank(0)
        for y in range(max(len(old), len(made))):
            before = old[y] if y < len(old) else blank
            if before != (made[y] if y < len(made) else blank):
                self.refresh(Region(0, y, width, 1))

    def get_text(self) -> str:
        """Return what the lines say."""
        return "\n".join(strip.text.rstrip() for strip in self._strips)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._strips):
            return Strip.blank(width)
        return self._strips[y].extend_cell_length(width)

    def on_resize(self) -> None:
        self._strips = []
        self.update_lines()
        self.refresh()
        self.post_message(self.Resized())


class OneLine(LinesWidget):
    """A line of text, such as a title."""

    DEFAULT_CSS = "OneLine { height: 1; width: 1fr; }"

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._line = Text()

    def show(self, line: Text | str, style: str = "") -> None:
        """Replace the line."""
        self._line = Text(clean_text(line), style) if isinstance(line, str) else line
        self.update_lines()

    def make_lines(self, width: int, height: int) -> list[Strip]:
        return [make_strip(self._line)]


class ScrolledLines(LinesWidget, can_focus=True):
    """Lines of a text that may be longer and wider than the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)", "down"),
        ("up,k", "move(-1)", "up"),
        ("pagedown", "page(1)", "page down"),
        ("pageup", "page(-1)", "page up"),
        ("home,g", "jump(False)", "begin"),
        ("end,G", "jump(True)", "end"),
        ("right", "shift(8)", "right"),
        ("left", "shift(-8)", "left"),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Text] = []
        self._top = self._left = 0

    def show(self, lines: Sequence[Text]) -> None:
        """Replace the text; the place in it is kept."""
        self._lines = list(lines)
        self.action_move(0)

    def make_lines(self, width: int, height: int) -> list[Strip]:
        shown = self._lines[self._top : self._top + height]
        return [make_strip(line).crop(self._left, self._left + width) for line in shown]

    def action_move(self, lines: int) -> None:
        self._top = max(0, min(self._top + lines, len(self._lines) - self.size.height))
        self.update_lines()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 1))

    def action_jump(self, is_end: bool) -> None:
        self.action_move(len(self._lines) if is_end else -self._top)

    def action_shift(self, columns: int) -> None:
        widest = max((line.cell_len for line in self._lines), default=0)
        self._left = max(0, min(self._left + columns, widest - self.size.width))
        self.update_lines()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)
