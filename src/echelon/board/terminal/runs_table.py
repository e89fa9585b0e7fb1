"""The table of runs: any number of them, of which those in sight are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.strip import Strip

from echelon.board.terminal.lines import BOLD, DIM, LinesWidget, fit_text
from echelon.board.terminal.row_values import Row, RowColumn
from echelon.views.table import STATE_STYLES

_GAP = 2
_MARK_WIDTH = 2
_SAMPLE = 300
"""Rows by which the width of a column is chosen."""
_MAX_WIDTHS = {"name": 32, "note": 40, "tags": 24, "state": 12, "step": 24, "host": 16}
_MAX_WIDTH = 20
_STATE_MARKS = {
    **{"running": "▶", "starting": "▷", "queued": "…", "requeued": "…", "finished": "✓"},
    **{"preempted": "‖", "pruned": "~", "cancelled": "■"},
    **{"failed": "✗", "lost": "✗", "broken": "!"},
}


@dataclass(frozen=True)
class RunGroup:
    """Runs that have one value of the setting by which they are grouped."""

    label: str
    rows: tuple[Row, ...]
    is_open: bool
    _cells: dict[str, str] = field(default_factory=dict, compare=False)

    def format_cell(self, column: RowColumn) -> str:
        """Return what a cell says; of thousands of runs it is found once."""
        if column.key not in self._cells:
            self._cells[column.key] = column.format_group_cell(self.rows)
        return self._cells[column.key]


TableItem = Row | RunGroup


def get_item_key(item: TableItem) -> str:
    """Return by what an item is known when the table has changed."""
    return f"group {item.label}" if isinstance(item, RunGroup) else str(item["id"])


class RunTable(LinesWidget, can_focus=True):
    """The table, with a title line and one row that is selected."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)", "down"),
        ("up,k", "move(-1)", "up"),
        ("pagedown,ctrl+f", "page(1)", "page down"),
        ("pageup,ctrl+b", "page(-1)", "page up"),
        ("home,g", "jump(False)", "first"),
        ("end,G", "jump(True)", "last"),
        ("right", "shift(1)", "columns to the right"),
        ("left", "shift(-1)", "columns to the left"),
    ]

    class Selected(Message):
        """Another row is selected."""

    class Opened(Message):
        """A row was clicked twice."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._items: Sequence[TableItem] = ()
        self._columns: list[RowColumn] = []
        self._widths: list[int] = []
        self._sort = ("", False)
        self._marks: Mapping[str, tuple[str, Style]] = {}
        self._top = self._first_column = 0
        self._message = ""
        self.cursor = 0

    # --- what is shown ---

    def show(
        self, items: Sequence[TableItem], columns: Sequence[RowColumn], sort: tuple[str, bool]
    ) -> None:
        """Replace the rows. The selected one stays selected, if it is still there."""
        selected = self.selected
        known = get_item_key(selected) if selected is not None else None
        at = self.cursor - self._top
        if known is not None:
            found = (i for i, item in enumerate(items) if get_item_key(item) == known)
            self.cursor = next(found, self.cursor)
            self._top = self.cursor - at
        if [c.key for c in columns] != [c.key for c in self._columns]:
            self._widths = []
        self._items, self._columns, self._sort = items, list(columns), sort
        self._measure()
        self._place()

    def show_message(self, text: str) -> None:
        """Set what is shown where there are no rows."""
        self._message = text
        self.update_lines()

    def mark(self, marks: Mapping[str, tuple[str, Style]]) -> None:
        """Set the marks before runs that are drawn, by id."""
        self._marks = marks
        self.update_lines()

    @property
    def selected(self) -> TableItem | None:
        """The item under the cursor."""
        return self._items[self.cursor] if self.cursor < len(self._items) else None

    def _measure(self) -> None:
        """Choose widths. A column never becomes narrower, so that nothing jumps."""
        step = max(1, len(self._items) // _SAMPLE)
        sample = self._items[::step]
        known = self._widths or [0] * len(self._columns)
        self._widths = []
        for column, before in zip(self._columns, known, strict=True):
            texts = (self._get_cell(item, column) for item in sample)
            widest = max((len(text) for text in texts), default=0)
            limit = _MAX_WIDTHS.get(column.key, _MAX_WIDTH)
            self._widths.append(max(before, min(limit, max(widest, len(column.title) + 1))))

    def _get_cell(self, item: TableItem, column: RowColumn) -> str:
        if isinstance(item, RunGroup):
            if column.key == "name":
                sign = "▾" if item.is_open else "▸"
                return f"{sign} {item.label} ({len(item.rows)})"
            return item.format_cell(column)
        text = column.format_cell(item)
        if column.key == "state":
            return f"{_STATE_MARKS.get(text, '?')} {text}"
        return text

    # --- lines ---

    def make_lines(self, width: int, height: int) -> list[Strip]:
        lines = [self._make_title_line(width)]
        shown = self._items[self._top : self._top + height - 1]
        for number, item in enumerate(shown, self._top):
            lines.append(self._make_line(item, number == self.cursor, width))
        if not shown and self._message:
            lines += [Strip([]), Strip([Segment("  " + fit_text(self._message, width - 2), DIM)])]
        return lines

    def _list_shown_columns(self) -> list[tuple[RowColumn, int]]:
        pairs = list(zip(self._columns, self._widths, strict=True))
        return pairs[:1] + pairs[1 + self._first_column :]

    def _make_title_line(self, width: int) -> Strip:
        key, is_reversed = self._sort
        parts = [Segment(" " * _MARK_WIDTH)]
        for column, size in self._list_shown_columns():
            is_sorted = column.key == key or (column.key == "age" and key == "when")
            title = column.title + (("▴" if is_reversed else "▾") if is_sorted else "")
            text = fit_text(title, size, column.is_right_aligned)
            parts += [Segment(text, BOLD if is_sorted else DIM), Segment(" " * _GAP)]
        return Strip(parts)

    def _make_line(self, item: TableItem, is_selected: bool, width: int) -> Strip:
        cursor = None
        if is_selected:
            cursor = Style(reverse=True, bold=self.has_focus)
        if isinstance(item, RunGroup):
            found = (self._marks[row["id"]] for row in item.rows if row["id"] in self._marks)
            mark, mark_style = next(found, (" ", Style()))
        else:
            mark, mark_style = self._marks.get(item["id"], (" ", Style()))
        parts = [Segment(mark + " " * (_MARK_WIDTH - 1), mark_style)]
        for column, size in self._list_shown_columns():
            text = fit_text(self._get_cell(item, column), size, column.is_right_aligned)
            style = cursor or self._choose_style(item, column)
            parts += [Segment(text, style), Segment(" " * _GAP, cursor)]
        strip = Strip(parts)
        return strip.extend_cell_length(width, cursor) if cursor else strip

    def _choose_style(self, item: TableItem, column: RowColumn) -> Style | None:
        if isinstance(item, RunGroup):
            return BOLD
        if column.key == "name":
            return BOLD
        if column.key == "state":
            return Style.parse(STATE_STYLES.get(item["state"], "none"))
        return DIM if column.key in ("age", "host", "time") else None

    # --- moving ---

    def _place(self) -> None:
        """Keep the cursor among the rows, and in sight."""
        rows = max(1, self.size.height - 1)
        self.cursor = max(0, min(self.cursor, len(self._items) - 1))
        self._top = min(max(self._top, self.cursor - rows + 1), self.cursor)
        self._top = max(0, min(self._top, len(self._items) - rows))
        self.update_lines()

    def action_move(self, rows: int) -> None:
        before = self.cursor
        self.cursor += rows
        self._place()
        if self.cursor != before:
            self.post_message(self.Selected())

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 2))

    def action_jump(self, is_end: bool) -> None:
        self.action_move(len(self._items) if is_end else -self.cursor)

    def action_shift(self, columns: int) -> None:
        last = max(0, len(self._columns) - 2)
        self._first_column = max(0, min(self._first_column + columns, last))
        self.update_lines()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        if event.y > 0:
            self.action_move(self._top + event.y - 1 - self.cursor)
            if event.chain == 2:
                self.post_message(self.Opened())

    def on_resize(self) -> None:
        self._place()

    def on_focus(self) -> None:
        self.update_lines()

    def on_blur(self) -> None:
        self.update_lines()
