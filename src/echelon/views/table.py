"""The renderer of tables on a terminal: aligned columns that shrink or go where it is narrow.

`echelon runs`, `jobs`, `show` and `sweep show` draw their tables with it. What is not a terminal
gets whole lines, however long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from echelon.utils.text import convert_for_terminal, truncate_text

PIPED_WIDTH = 1000
"""Columns of what is not a terminal: a line is then for another program, and stays whole."""
STATE_STYLES = {
    **{"running": "green", "starting": "green", "queued": "yellow", "requeued": "yellow"},
    **{"finished": "blue", "preempted": "yellow", "pruned": "cyan"},
    **{"cancelled": "magenta"},
    **{"failed": "red", "lost": "red", "broken": "red"},
}
_GAP = 2
"""Spaces between two columns."""


def get_width(console: Console) -> int:
    """Return the columns of the terminal; output to a file or pipe is not cut."""
    return console.width if console.is_terminal else PIPED_WIDTH


@dataclass(frozen=True)
class TableColumn:
    """A title and the cells below it."""

    title: str
    cells: Sequence[str]
    is_right_aligned: bool = False
    styles: Sequence[str] = ()
    """Of the cells; empty if they have none."""
    min_width: int | None = None
    """The width to which it may shrink in a table that is too wide; its cells are then cut. None
    means that it never shrinks."""
    priority: int = 0
    """A column with 0 is always shown. The others are left out where the table is too wide: the
    lower its number, the longer a column is kept."""

    @property
    def width(self) -> int:
        """The width at which nothing is cut, in characters."""
        return max(map(len, [self.title, *self.cells]))

    def render_cell(self, row: int, width: int) -> Text:
        """Return a cell in exactly ``width`` characters, with its style."""
        return Text(self._align(self.cells[row], width), self.styles[row] if self.styles else "")

    def render_title(self, width: int) -> Text:
        """Return the title in exactly ``width`` characters."""
        return Text(self._align(self.title, width))

    def _align(self, text: str, width: int) -> str:
        cut = convert_for_terminal(truncate_text(text, width))
        return f"{cut:>{width}}" if self.is_right_aligned else f"{cut:<{width}}"


class RowNote(NamedTuple):
    """A line below a row."""

    text: str
    style: str


@dataclass(frozen=True)
class Table:
    """Columns side by side, and a note below each row that has one."""

    columns: Sequence[TableColumn]
    notes: Sequence[RowNote | None] = ()
    """One for each row; empty if no row has one."""
    header_style: str = "bold"
    indent: int = 0
    is_cut: bool = True
    """Whether a line is cut if it is still too long when nothing more may be dropped or shrunk;
    else the terminal wraps it."""

    @property
    def width(self) -> int:
        """The characters of its longest line, notes aside."""
        return self._sum_widths([column.width for column in self.columns])

    def render(self, width: int) -> list[Text]:
        """Return the lines of the table: its titles, then each row with its note."""
        table = self._drop_columns(width)
        widths = table._shrink_columns(width)
        columns = list(zip(table.columns, widths, strict=True))
        header = self._join_cells([column.render_title(w) for column, w in columns], width)
        header.stylize(self.header_style)
        lines = [header]
        for row in range(len(table.columns[0].cells)):
            lines.append(
                self._join_cells([column.render_cell(row, w) for column, w in columns], width)
            )
            if self.notes and (note := self.notes[row]):
                text = truncate_text(f"  └ {note.text}", width)
                lines.append(Text(convert_for_terminal(text), note.style))
        return lines

    def _drop_columns(self, width: int) -> Table:
        if self.width <= width:
            return self
        kept = [column for column in self.columns if not column.priority]
        for column in sorted(self.columns, key=lambda column: column.priority):
            wider = [c for c in self.columns if c is column or c in kept]
            if column.priority and replace(self, columns=wider).width <= width:
                kept = wider
        return replace(self, columns=kept)

    def _shrink_columns(self, width: int) -> list[int]:
        """Return the width of each column, after the widest of those that shrink gave way."""
        widths = [column.width for column in self.columns]
        while self._sum_widths(widths) > width:
            shrinkable = [
                i
                for i, column in enumerate(self.columns)
                if column.min_width is not None and widths[i] > column.min_width
            ]
            if not shrinkable:
                break
            widths[max(shrinkable, key=lambda i: widths[i])] -= 1
        return widths

    def _sum_widths(self, widths: Sequence[int]) -> int:
        return self.indent + sum(widths) + _GAP * (len(widths) - 1)

    def _join_cells(self, cells: Iterable[Text], width: int) -> Text:
        line = Text(" " * self.indent) + Text(" " * _GAP).join(cells)
        line.rstrip()
        if self.is_cut and len(line) > width:
            line = line[: width - 1].append(convert_for_terminal("…"))
        return line


def choose_table(tables: Iterable[Table], width: int) -> Table:
    """Return the first table that fits; if none does, the last, which then drops and shrinks
    columns."""
    table = None
    for table in tables:
        if table.width <= width:
            break
    assert table is not None
    return table
