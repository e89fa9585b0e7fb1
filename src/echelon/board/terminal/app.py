"""The program: the board of the folders of runs, and what is heard of them."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from textual.app import App
from textual.binding import BindingType
from textual.color import Color
from textual.filter import LineFilter

from echelon.board.live_updates import LiveUpdates
from echelon.board.request import Request
from echelon.board.server import Board, annotate
from echelon.board.terminal.row_values import Row
from echelon.board.terminal.run_screen import RunScreen
from echelon.board.terminal.runs_screen import RunsScreen
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.run_folder import Run
from echelon.utils.text import can_print_unicode, convert_to_ascii

_SIGNS = str.maketrans(
    {
        **{"▶": ">", "▷": ">", "✓": "+", "‖": "=", "■": "#", "✗": "x", "●": "*", "▾": "v"},
        **{"▴": "^", "▸": ">", "±": "~", "│": "|", "┤": "|"},
    }
)


def run_terminal_board(roots: list[Path]) -> int:
    """Show the board until it is left. Raises EchelonError without a terminal."""
    # What draws on the terminal writes to stderr.
    for stream, name in ((sys.stdin, "stdin"), (sys.stdout, "stdout"), (sys.stderr, "stderr")):
        if not stream.isatty():
            do = "`echelon runs` prints the table into a file or pipe"
            raise EchelonError(Fault(f"--tui needs a terminal, and {name} is none", do))
    board = TerminalBoard(Board(roots))
    board.run(mouse=True)
    return board.return_code or ExitCode.OK


class WatchedRuns(Collection[str]):
    """The ids of the runs whose growth is asked about. They may be replaced in any thread."""

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()

    def __contains__(self, run_id: object) -> bool:
        return run_id in self.ids

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class AsciiFilter(LineFilter):
    """Replaces every sign that is not ASCII by a similar one of the same width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the parts of a line in ASCII."""
        return [Segment(_make_ascii(s.text), s.style, s.control) for s in segments]


def _make_ascii(text: str) -> str:
    if text.isascii():
        return text
    from rich.cells import cell_len

    similar = convert_to_ascii(text.translate(_SIGNS))
    return "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in similar)


class TerminalBoard(App[None]):
    """The board in a terminal. It has the colours of the terminal, on its own background."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; layout: vertical; overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("ctrl+c", "quit", "quit")]
    TITLE = "echelon board"

    def __init__(self, board: Board, is_unicode: bool | None = None) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.animation_level = "none"
        self.board = board
        self.rows: dict[str, Row] = {}
        self.is_complete = False
        self.has_rows = False
        """Whether the index has been read."""
        self.watched = WatchedRuns()
        if is_unicode is None:
            is_unicode = can_print_unicode(sys.stdout, os.environ)
        self.is_unicode = is_unicode
        self._is_leaving = False

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return what changes lines on their way to the terminal."""
        filters = list(super().get_line_filters())
        return filters if self.is_unicode else [*filters, AsciiFilter()]

    def on_mount(self) -> None:
        self.push_screen(RunsScreen())
        threading.Thread(target=self._listen, name="board-rows", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_leaving = True

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings that a run has unless its row says otherwise."""
        return self.board.index.get_defaults()

    def find_run(self, run_id: str) -> Run:
        """Return the run of an id; RequestError where there is none."""
        run: Run = self.board.find_run(run_id)
        return run

    def annotate(
        self, run_id: str, note: str | None, add_tags: Sequence[str], remove_tags: Sequence[str]
    ) -> None:
        """Write the note and tags of a run, as the page does."""
        data = {"note": note, "add_tags": list(add_tags), "remove_tags": list(remove_tags)}
        body = json.dumps(data).encode()
        annotate(Request("POST", "", self.board, {"id": run_id}, {}, {}, body))

    # --- what is heard ---

    def _listen(self) -> None:
        """Take over the rows of the index, and then what changes."""
        self.board.index.load()
        while not self._is_leaving:
            generation, is_complete, text = self.board.index.render_rows()
            self._tell(self._replace_rows, json.loads(text), is_complete)
            self._follow(self.board.watch, generation)

    def _follow(self, watch: LiveUpdates, generation: int) -> None:
        """Take over changes, until all must be read again."""
        for piece in watch.listen(generation, self.watched):
            for event in piece.split(b"\n\n"):
                head, _, data = event.partition(b"\ndata: ")
                if self._is_leaving or head == b"event: reload":
                    return
                if head == b"event: rows":
                    self._tell(self._change_rows, json.loads(data))
                elif head in (b"event: metrics", b"event: logs"):
                    kind = head.decode().removeprefix("event: ")
                    self._tell(self._note_growth, kind, json.loads(data)["runs"])

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        if not self._is_leaving:
            self.call_from_thread(function, *values)

    def _replace_rows(self, rows: list[Row], is_complete: bool) -> None:
        self.rows = {row["id"]: row for row in rows}
        self.has_rows, self.is_complete = True, is_complete
        self._tell_screens(None)

    def _change_rows(self, changes: dict[str, Any]) -> None:
        self.is_complete = changes["complete"]
        for run_id in changes["removed"]:
            self.rows.pop(run_id, None)
        for row in changes["changed"]:
            self.rows[row["id"]] = row
        self._tell_screens({row["id"] for row in changes["changed"]} | set(changes["removed"]))

    def _tell_screens(self, changed: set[str] | None) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, (RunsScreen, RunScreen)):
                screen.take_rows(changed)

    def _note_growth(self, kind: str, run_ids: list[str]) -> None:
        screen = self.screen
        if isinstance(screen, (RunsScreen, RunScreen)):
            screen.take_growth(kind, run_ids)
