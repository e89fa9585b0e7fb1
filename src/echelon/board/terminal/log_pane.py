"""The logs of a run: any place of them at once, however long they are, and live at their end."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import BindingType
from textual.message import Message
from textual.strip import Strip

from echelon.board.log_lines import LogIndexes, LogPageLine, MergedLogs
from echelon.board.log_search import SearchQuery
from echelon.board.request import RequestError
from echelon.board.terminal.lines import DIM, LinesWidget, clean_ansi, make_strip
from echelon.runs.run_folder import Run

_WAIT_S = 0.3
_PAUSE_S = 0.25
_FOUND = Style(reverse=True)
_indexes = LogIndexes()


class _Found(NamedTuple):
    """What was read of logs."""

    mark: str
    total: int
    is_complete: bool
    lines: list[LogPageLine]
    matches: Sequence[int]
    match_count: int
    is_searching: bool
    fault: str


_NOTHING = _Found("", 0, False, [], (), 0, False, "")


class LogPane(LinesWidget, can_focus=True):
    """Lines of the chosen logs, merged in order of time. They are read in a thread of their own."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)", "down"),
        ("up,k", "move(-1)", "up"),
        ("pagedown,space", "page(1)", "page down"),
        ("pageup", "page(-1)", "page up"),
        ("home,g", "jump(False)", "begin"),
        ("end,G", "jump(True)", "end"),
        ("right", "shift(16)", "right"),
        ("left", "shift(-16)", "left"),
        ("n", "next_match(1)", "next match"),
        ("N", "next_match(-1)", "match before"),
    ]

    class Changed(Message):
        """Something is to be said anew about the logs."""

    def __init__(self, find_run: Callable[[], Run], id: str | None = None) -> None:
        super().__init__(id=id)
        self._find_run = find_run
        self.names: tuple[str, ...] = ()
        """The chosen logs; none: those that `echelon logs` shows."""
        self._query: SearchQuery | None = None
        self._jumps_to_match = False
        self._top, self._left = 0, 0
        self._follows = True
        self._found = _NOTHING
        self._lines: dict[int, LogPageLine] = {}
        self._match = -1
        """The number of the line of the match that was jumped to."""
        self._wanted = threading.Event()
        self._is_ending = threading.Event()

    def on_mount(self) -> None:
        threading.Thread(target=self._keep_reading, name="board-logs", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_ending.set()
        self._wanted.set()

    # --- what is asked for ---

    def read_again(self) -> None:
        """Read the logs anew: they may have grown."""
        self._wanted.set()

    def choose(self, names: Sequence[str]) -> None:
        """Show other logs."""
        self.names, self._follows = tuple(names), True
        self.read_again()

    def search(self, text: str) -> None:
        """Search a text, or ``/a regular expression/``; nothing ends the search."""
        is_regex = len(text) > 2 and text.startswith("/") and text.endswith("/")
        pattern = text[1:-1] if is_regex else text
        self._query = SearchQuery(pattern, is_regex, False) if pattern else None
        self._match, self._jumps_to_match = -1, bool(pattern)
        self.read_again()

    @property
    def has_search(self) -> bool:
        """Whether something is searched."""
        return self._query is not None

    def describe(self) -> str:
        """Return where in the logs this is, and what was found."""
        found = self._found
        if found.fault:
            return found.fault
        if not found.total:
            return "no log has a line yet" if found.is_complete else "reading…"
        last = min(self._top + self.size.height, found.total)
        said = [f"lines {self._top + 1:,} – {last:,} of {found.total:,}"]
        said += [", ".join(self.names)] if self.names else []
        said += ["following"] if self._follows else []
        said += [] if found.is_complete else ["reading…"]
        if self._query is not None:
            at = bisect_left(found.matches, self._match) + 1 if self._match >= 0 else 0
            place = f"{at} of " if at else ""
            said.append(f"{self._query.pattern!r}: {place}{found.match_count:,} found")
            said += ["searching…"] if found.is_searching else []
        return "  ".join(said)

    # --- reading ---

    def _keep_reading(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_ending.is_set():
                return
            found = self._read()
            if self._is_ending.is_set():
                return
            self.app.call_from_thread(self._take, found)
            if not found.is_complete or found.is_searching:
                self._is_ending.wait(_PAUSE_S)
                self._wanted.set()

    def _read(self) -> _Found:
        try:
            index = self._update_index()
            return self._read_from(index)
        except RequestError as error:
            return _NOTHING._replace(fault=error.what, is_complete=True)
        except OSError as error:
            return _NOTHING._replace(fault=str(error), is_complete=True)

    def _update_index(self) -> MergedLogs:
        run = self._find_run()
        index = _indexes.get(run, self.names)
        index.update(_WAIT_S)
        if index.has_begun_anew:
            index = _indexes.get(run, self.names)
            index.update(_WAIT_S)
        return index

    def _read_from(self, index: MergedLogs) -> _Found:
        height = max(1, self.size.height)
        is_complete = index.is_complete
        _, total = index.read_page(0, 0)
        top = max(0, total - height) if self._follows else self._top
        lines, total = index.read_page(max(0, top - height), 3 * height)
        found = _Found(index.mark, total, is_complete, lines, (), 0, False, "")
        query = self._query
        if query is None:
            return found
        data = index.search(query, _WAIT_S).to_dict()
        return found._replace(
            matches=data["matches"],
            match_count=data["match_count"],
            is_searching=data["searching"],
            fault=data.get("search_fault", ""),
        )

    def _take(self, found: _Found) -> None:
        self._found = found
        self._lines = {line.n: line for line in found.lines}
        if self._follows:
            self._top = max(0, found.total - self.size.height)
        if self._jumps_to_match and (found.matches or not found.is_searching):
            self._jumps_to_match = False
            self._jump_to_match(self._top, 1)
        self._place()

    def _place(self) -> None:
        end = max(0, self._found.total - self.size.height)
        self._top = max(0, min(self._top, end))
        if self._follows and self._top < end:
            self._follows = False
        last = min(self._top + self.size.height, self._found.total)
        if all(n in self._lines for n in range(self._top, last)):
            self.update_lines()
        else:
            self.read_again()
        self.post_message(self.Changed())

    # --- moving ---

    def action_move(self, lines: int) -> None:
        self._top += lines
        self._follows = self._top + self.size.height >= self._found.total
        self._place()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 1))

    def action_jump(self, is_end: bool) -> None:
        self.action_move(self._found.total if is_end else -self._top)

    def action_shift(self, columns: int) -> None:
        self._left = max(0, self._left + columns)
        self.update_lines()

    def action_next_match(self, step: int) -> None:
        start = self._match + step if self._match >= 0 else self._top
        self._jump_to_match(start, step)
        self._place()

    def _jump_to_match(self, start: int, step: int) -> None:
        """Go to the first match from a line on, or the last one before it, or around."""
        matches = self._found.matches
        if not matches:
            return
        at = bisect_left(matches, start) if step > 0 else bisect_right(matches, start) - 1
        self._match = matches[at % len(matches)]
        self._top, self._follows = self._match - self.size.height // 2, False

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def on_resize(self) -> None:
        self.read_again()

    # --- drawing ---

    def make_lines(self, width: int, height: int) -> list[Strip]:
        shown = [self._lines[n] for n in range(self._top, self._top + height) if n in self._lines]
        names = {line.name for line in self._lines.values()}
        name_width = max(map(len, names)) if len(names) > 1 else 0
        return [self._make_line(line, name_width, width) for line in shown]

    def _make_line(self, line: LogPageLine, name_width: int, width: int) -> Strip:
        # A line may have 64 kB, of which a screen shows little.
        text = clean_ansi(line.text[: 8 * (self._left + width)])
        if line.cut_bytes:
            text.append(f" … {line.cut_bytes:,} bytes more", "dim")
        self._mark_found(text)
        strip = make_strip(text).crop(self._left, self._left + width)
        sign = "▸" if line.n == self._match else " "
        head = f"{line.name:<{name_width}} {sign}" if name_width else sign if self._query else ""
        return Strip([Segment(head, DIM), *strip]) if head else strip

    def _mark_found(self, text: Text) -> None:
        query = self._query
        if query is None:
            return
        if query.is_regex:  # one that never ends would stand still here: the whole line is marked
            return
        for match in re.finditer(re.escape(query.pattern), text.plain, re.IGNORECASE):
            text.stylize(_FOUND, *match.span())
