"""The first screen: the table of runs, and the curves of those that are ticked or selected."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from echelon.board.request import RequestError
from echelon.board.terminal.curve_panel import CurvePanel, CurveScreen, DrawnRun
from echelon.board.terminal.lines import OneLine, clean_text
from echelon.board.terminal.prompts import ChoiceScreen, HelpScreen, PromptBar
from echelon.board.terminal.row_values import (
    MISSING,
    Row,
    RowColumn,
    RowQuery,
    RowValues,
    choose_columns,
    find_differing_settings,
    format_states,
    is_active,
    list_metrics,
    list_settings,
    sort_rows,
)
from echelon.board.terminal.run_screen import RunScreen
from echelon.board.terminal.runs_table import RunGroup, RunTable, TableItem
from echelon.errors import EchelonError, Fault
from echelon.runs.annotations import read_annotations, require_valid_tags
from echelon.utils.text import format_count
from echelon.views.run_settings import format_setting_value

if TYPE_CHECKING:
    from echelon.board.terminal.app import TerminalBoard

_MAX_DRAWN = 24
_WIDE = 170
"""Columns from which on the curves are beside the table."""
_NO_GROUP = "(no groups)"
_MIN_PAUSE_S = 0.1
_COST_SHARE = 0.2
"""Of one core, for tables that are sorted again and again while runs go on."""
_AGES_EVERY_S = 20.0
_SELECTION_PAUSE_S = 0.1
_KEYS = "? help  / filter  space draw  enter open  o sort  b group  m metric  q quit"


class RunsScreen(CurveScreen):
    """The table and the curves."""

    CSS = """
    RunsScreen > Container { layout: vertical; height: 1fr; }
    RunsScreen RunTable { height: 3fr; }
    RunsScreen CurvePanel { height: 2fr; min-height: 8; }
    RunsScreen.-wide > Container { layout: horizontal; }
    RunsScreen.-wide RunTable { height: 1fr; width: 3fr; padding-right: 1; }
    RunsScreen.-wide CurvePanel { height: 1fr; width: 2fr; }
    RunsScreen.-only-table CurvePanel { display: none; }
    RunsScreen.-only-curves RunTable { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("slash", "filter", "filter"),
        ("enter", "open", "open"),
        ("space", "tick", "draw"),
        ("c", "clear", "draw none"),
        ("o", "choose_sort", "sort"),
        ("less_than_sign", "sort_beside(-1)", "sort by the column before"),
        ("greater_than_sign", "sort_beside(1)", "sort by the next column"),
        ("r", "reverse", "the other way round"),
        ("b", "choose_group", "group"),
        ("a", "toggle_all", "show all"),
        ("n", "note", "note"),
        ("t", "tags", "tags"),
        ("z", "next_layout", "what is shown"),
        ("question_mark", "help", "help"),
        ("q", "app.quit", "quit"),
        ("escape", "clear_filter", "no filter"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._query_text = ""
        self._query = RowQuery()
        self._sort, self._is_reversed = "when", False
        self._group = ""
        self._open_groups: set[str] = set()
        self._shows_all = False
        self._ticked: dict[str, int] = {}
        """The numbers of their colours, by id."""
        self._visible: list[Row] = []
        self._columns: list[RowColumn] = []
        self._is_due = False
        self._cost_s = 0.0
        self._has_metric = False

    @property
    def board_app(self) -> TerminalBoard:
        """The program."""
        return cast("TerminalBoard", self.app)

    def compose(self) -> ComposeResult:
        app = self.board_app
        yield OneLine(id="title")
        with Container():
            yield RunTable()
            yield CurvePanel(app.find_run, app.is_unicode, not app.no_color)
        yield PromptBar()
        yield OneLine(id="keys")

    def on_mount(self) -> None:
        self.query_one("#keys", OneLine).show(_KEYS, "dim")
        self._table.show_message("reading the runs…")
        self._table.focus()
        self.set_interval(_AGES_EVERY_S, self._table.update_lines)
        self._show_rows()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE, "-wide")
        self._show_rows()

    def on_screen_resume(self) -> None:
        self._show_rows()

    @property
    def _table(self) -> RunTable:
        return self.query_one(RunTable)

    # --- what is heard ---

    def take_rows(self, changed: set[str] | None) -> None:
        """Show rows that have changed, all of them for None."""
        if not self._is_due:
            self._is_due = True
            self.set_timer(max(_MIN_PAUSE_S, self._cost_s / _COST_SHARE), self._show_due_rows)

    def take_growth(self, kind: str, run_ids: list[str]) -> None:
        """Draw curves again that have grown."""
        if kind == "metrics":
            self.curves.read_again()

    def _show_due_rows(self) -> None:
        self._is_due = False
        if self.is_current:
            self._show_rows()

    def _show_rows(self) -> None:
        """Filter, sort and group the rows, and show them."""
        app = self.board_app
        if not app.has_rows:
            return
        began = time.monotonic()
        defaults = app.defaults
        known = [r for r in app.rows.values() if self._shows_all or not _is_left_out(r)]
        try:
            found = self._query.select(known, defaults)
        except EchelonError:  # a name that the last run with it took away
            found = []
        self._visible = sort_rows(found, self._sort, self._is_reversed, defaults)
        keys = choose_columns(self._visible, defaults, len(app.board.roots))
        if self._sort not in (*keys, "when"):
            keys.insert(4, self._sort)
        self._columns = [RowColumn(key, self._visible, defaults) for key in keys]
        if not self._has_metric and (metrics := self.list_metrics()):
            self._has_metric = True
            self.curves.change(metric=metrics[0])
        items = self._make_groups() if self._group else list(self._visible)
        self._table.show(items, self._columns, (self._sort, self._is_reversed))
        self._table.show_message(self._explain_nothing(len(known)))
        self._show_title(len(known))
        self._ticked = {run_id: n for run_id, n in self._ticked.items() if run_id in app.rows}
        self._draw_selected()
        self._cost_s = time.monotonic() - began

    def _make_groups(self) -> list[TableItem]:
        groups: dict[str, list[Row]] = {}
        for row in self._visible:
            is_sweep = self._group == "sweep"
            values = RowValues(row, self.board_app.defaults)
            value = row.get("sweep") if is_sweep else values.get(self._group)
            text = MISSING if value is None else format_setting_value(value)
            groups.setdefault(f"{self._group}={text}", []).append(row)
        items: list[TableItem] = []
        for label, rows in groups.items():
            is_open = label in self._open_groups
            items.append(RunGroup(label, tuple(rows), is_open))
            items += rows if is_open else []
        return items

    def _explain_nothing(self, known: int) -> str:
        if known:
            return "no run is such a one; escape shows all"
        if not self.board_app.is_complete:
            return "reading the runs…"
        return "no runs yet; start one with `echelon train`"

    def _show_title(self, known: int) -> None:
        app = self.board_app
        shown = len(self._visible)
        count = f"{shown} of {format_count(known, 'run')}" if shown < known else None
        hidden = len(app.rows) - known
        active = list(filter(is_active, self._visible))
        parts = [
            count or format_count(known, "run"),
            *(
                [format_states(active)]
                if (active := list(filter(is_active, self._visible)))
                else []
            ),
            *([self._query_text] if self._query_text else []),
            *([f"by {self._group}"] if self._group else []),
            *([f"{hidden} hidden (a)"] if hidden else []),
            *([] if app.is_complete else ["reading…"]),
        ]
        title = Text("echelon board ", "bold")
        title.append(" ".join(str(root) for root in app.board.roots), "dim not bold")
        text = Text("  ").append("  ".join(map(clean_text, parts)), "not bold")
        # Of a path that is too long the end says more than the beginning.
        room = self.size.width - text.cell_len
        if title.cell_len > room:
            title = Text(title.plain[-room:] if room > 0 else "", "dim")
        self.query_one("#title", OneLine).show(title.append_text(text))

    # --- what is drawn ---

    def list_metrics(self) -> list[str]:
        rows = self._list_drawn_rows() or self._visible
        return list_metrics(rows)

    def _list_drawn_rows(self) -> list[Row]:
        rows = self.board_app.rows
        if self._ticked:
            return [rows[run_id] for run_id in self._ticked if run_id in rows]
        selected = self._table.selected
        if isinstance(selected, RunGroup):
            return list(selected.rows[:_MAX_DRAWN])
        return [] if selected is None else [selected]

    def on_run_table_selected(self) -> None:
        if not self._ticked:
            # While the cursor runs through the table nothing is read.
            self.set_timer(_SELECTION_PAUSE_S, self._draw_selected)

    def _draw_selected(self) -> None:
        drawn = tuple(
            DrawnRun(row["id"], row["name"], self._ticked.get(row["id"], number), is_active(row))
            for number, row in enumerate(self._list_drawn_rows())
        )
        self.board_app.watched.ids = tuple(run.run_id for run in drawn)
        signs = {
            run.run_id: (run.letter if self.board_app.no_color else "●", run.style)
            for run in drawn
            if self._ticked
        }
        self._table.mark(signs)
        self.curves.change(runs=drawn)

    def action_tick(self) -> None:
        selected = self._table.selected
        if selected is None:
            return
        rows = selected.rows if isinstance(selected, RunGroup) else (selected,)
        ids = [row["id"] for row in rows]
        if all(run_id in self._ticked for run_id in ids[:_MAX_DRAWN]):
            for run_id in ids:
                self._ticked.pop(run_id, None)
        else:
            for run_id in ids:
                self._tick(run_id)
        self._draw_selected()
        if not isinstance(selected, RunGroup):
            self._table.action_move(1)

    def _tick(self, run_id: str) -> None:
        if run_id in self._ticked:
            return
        if len(self._ticked) >= _MAX_DRAWN:
            self._say(f"{_MAX_DRAWN} runs are drawn at most; c: none")
            return
        taken = set(self._ticked.values())
        self._ticked[run_id] = next(n for n in range(_MAX_DRAWN) if n not in taken)

    def action_clear(self) -> None:
        self._ticked = {}
        self._draw_selected()

    def _say(self, text: str) -> None:
        """Show a sentence in the place of the keys for a while."""
        line = self.query_one("#keys", OneLine)
        line.show(text, "bold")
        self.set_timer(4.0, lambda: line.show(_KEYS, "dim"))

    # --- filter, order, groups ---

    def action_filter(self) -> None:
        before = self._query_text
        self._ask("filter:", before, lambda text: self._take_filter(before, text), self._set_filter)

    def _take_filter(self, before: str, text: str | None) -> None:
        """Take over what was typed; after Escape it is as before."""
        self._set_filter(before if text is None else text)
        self._table.focus()

    def _set_filter(self, text: str) -> None:
        query = RowQuery.parse(text)
        query.select(list(self.board_app.rows.values()), self.board_app.defaults)
        self._query_text, self._query = text.strip(), query
        self._show_rows()

    def action_clear_filter(self) -> None:
        if self._query_text:
            self._set_filter("")

    def action_choose_sort(self) -> None:
        names = list(dict.fromkeys(["when", *(c.key for c in self._columns), *self._list_names()]))
        names = [name for name in names if name not in ("age", "root")]
        screen = ChoiceScreen("Sort by what?", names, {self._sort})
        self.app.push_screen(screen, lambda found: self._sort_by(found[0]) if found else None)

    def _list_names(self) -> list[str]:
        rows = self._visible
        return [*list_metrics(rows), *list_settings(rows)]

    def _sort_by(self, key: str) -> None:
        self._sort, self._is_reversed = key, False
        self._show_rows()

    def action_sort_beside(self, columns: int) -> None:
        keys = [
            "when" if column.key == "age" else column.key
            for column in self._columns
            if column.key != "root"
        ]
        at = keys.index(self._sort) if self._sort in keys else 0
        if keys:
            self._sort_by(keys[(at + columns) % len(keys)])

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._show_rows()

    def action_choose_group(self) -> None:
        differing = find_differing_settings(self._visible, self.board_app.defaults)
        own = ["experiment", "state", "host", "tags", "sweep"]
        names = list(dict.fromkeys([_NO_GROUP, *differing, *own, *list_settings(self._visible)]))
        screen = ChoiceScreen("Group by what?", names, {self._group or _NO_GROUP})
        self.app.push_screen(screen, lambda found: self._group_by(found[0]) if found else None)

    def _group_by(self, key: str) -> None:
        self._group = "" if key == _NO_GROUP else key
        self._open_groups = set()
        self._show_rows()

    def action_toggle_all(self) -> None:
        self._shows_all = not self._shows_all
        self._show_rows()

    def action_next_layout(self) -> None:
        layouts = ("-both", "-only-curves", "-only-table")
        at = next((i for i, name in enumerate(layouts) if self.has_class(name)), 0)
        self.remove_class(*layouts)
        self.add_class(layouts[(at + 1) % len(layouts)])
        if not self._table.display:
            self.set_focus(None)
        else:
            self._table.focus()

    # --- notes and tags ---

    def _ask(self, label: str, value: str, on_done: Any, on_change: Any = None) -> None:
        self.query_one(PromptBar).ask(label, value, on_done, on_change)

    def _find_selected_row(self) -> Row | None:
        selected = self._table.selected
        return None if selected is None or isinstance(selected, RunGroup) else selected

    def action_note(self) -> None:
        row = self._find_selected_row()
        if row is not None:
            value = self._read_annotations(row).get("note", "")
            self._ask("note:", value, lambda text: self._annotate(row, text))

    def _annotate(self, row: Row, note: str | None) -> None:
        if note is not None:
            self._write(row, note.strip(), (), ())
        self._table.focus()

    def action_tags(self) -> None:
        row = self._find_selected_row()
        if row is not None:
            tags = self._read_annotations(row).get("tags", ())
            self._ask("tags:", " ".join(tags), lambda text: self._set_tags(row, tags, text))

    def _set_tags(self, row: Row, before: tuple[str, ...], text: str | None) -> None:
        if text is not None:
            tags = text.replace(",", " ").split()
            require_valid_tags(tags)
            self._write(row, None, tags, [tag for tag in before if tag not in tags])
        self._table.focus()

    def _read_annotations(self, row: Row) -> Mapping[str, Any]:
        try:
            found = read_annotations(self.board_app.find_run(row["id"]))
        except RequestError as error:
            self._say(error.what)
            return {}
        return {"note": found.note.replace("\n", " "), "tags": found.tags}

    def _write(self, row: Row, note: str | None, add: Any, remove: Any) -> None:
        try:
            self.board_app.annotate(row["id"], note, add, remove)
        except RequestError as error:
            raise EchelonError(Fault(error.what, error.hint)) from None

    # --- other screens ---

    def action_open(self) -> None:
        selected = self._table.selected
        if isinstance(selected, RunGroup):
            self._open_groups ^= {selected.label}
            self._show_rows()
        elif selected is not None:
            view = replace(self.curves.view, from_x=None, to_x=None)
            self.app.push_screen(RunScreen(selected["id"], view))

    def on_run_table_opened(self) -> None:
        self.action_open()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())


def _is_left_out(row: Row) -> bool:
    """Return whether lists leave a run out unless all are asked for."""
    return bool(row.get("archived") or row.get("early")) and not is_active(row)
