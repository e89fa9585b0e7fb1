"""What asks a person for something: a line to type in, a list to choose from, the help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.strip import Strip
from textual.widgets import Input

from echelon.board.terminal.lines import BOLD, DIM, LinesWidget, OneLine, ScrolledLines, fit_text
from echelon.errors import EchelonError

_KEYS = {
    "Table": [
        ("up, down, j, k", "select a run; page up and down, g, G: far"),
        ("left, right", "more columns"),
        ("enter", "look at the run, or open and close a group"),
        ("space", "draw the run, or all of a group; c: none"),
        ("/", "filter: lr>=0.01 state=finished name=seed-*, or words"),
        ("o, <, >, r", "sort by a name, by the column beside, backwards"),
        ("b", "group by a setting"),
        ("a", "show archived runs, and those that ended before step 1"),
        ("n, t", "write the note, the tags"),
        ("z", "table and curves, curves alone, table alone"),
    ],
    "Curves": [
        ("m, M", "the next metric, choose one"),
        ("+, -, 0", "zoom in, out, all"),
        ("[, ]", "earlier, later"),
        ("l", "logarithmic axis, and back"),
        ("s", "smooth more, not at all"),
        ("x", "over steps, epochs, samples, time at work"),
    ],
    "One run": [
        ("1 … 6, tab", "overview, curves, settings, time line, snapshots, logs"),
        ("f", "in logs: which ranks"),
        ("/, n, N", "in logs: search text or /expression/, next, the one before"),
        ("G", "in logs: the end, and follow"),
        ("escape", "back to the table"),
    ],
    "Anywhere": [("?", "this"), ("q", "quit, or back")],
}


class PlainInput(Input):
    """An input of one line without a frame. Its cursor does not blink: that would be sent twice a
    second."""

    DEFAULT_CSS = """
    PlainInput, PlainInput:focus { border: none; padding: 0; height: 1; width: 1fr;
        background: ansi_default; color: ansi_default; }
    PlainInput > .input--cursor { background: ansi_default; color: ansi_default;
        text-style: reverse; }
    PlainInput > .input--placeholder { color: ansi_default; text-style: dim; }
    """

    def __init__(self, value: str = "", placeholder: str = "") -> None:
        # What is there is added to: a note that is selected would be gone with the first key.
        super().__init__(value, placeholder, compact=True, select_on_focus=False)
        self.cursor_blink = False


class PromptBar(Vertical):
    """A line to type in at the bottom, with what is wrong below it. It is not there otherwise."""

    DEFAULT_CSS = """
    PromptBar { height: auto; display: none; }
    PromptBar > Horizontal { height: 1; }
    PromptBar #label { width: auto; }
    PromptBar #fault { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_change: Callable[[str], None] | None = None
        self._on_done: Callable[[str | None], None] = lambda text: None

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield OneLine(id="label")
            yield PlainInput()
        yield OneLine(id="fault")

    def ask(
        self,
        label: str,
        value: str,
        on_done: Callable[[str | None], None],
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Ask for a line. `on_done` gets it, or None after Escape; an EchelonError that it raises
        is shown, and the question stays."""
        self._on_change, self._on_done = on_change, on_done
        title = self.query_one("#label", OneLine)
        title.styles.width = len(label) + 1
        title.show(label, "bold")
        box = self.query_one(PlainInput)
        with box.prevent(Input.Changed):
            box.value = value
        box.cursor_position = len(value)
        self.show_fault("")
        self.display = True
        box.focus()

    @property
    def is_open(self) -> bool:
        """Whether something is asked."""
        return bool(self.display)

    def show_fault(self, text: str) -> None:
        """Show what is wrong below the line; nothing for no text."""
        line = self.query_one("#fault", OneLine)
        line.display = bool(text)
        line.show(text, "red")

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._on_change is not None and self.is_open:
            self._try(lambda: self._on_change and self._on_change(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._try(lambda: self._on_done(event.value)):
            self.display = False

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape":
            event.stop()
            self.display = False
            self._on_done(None)

    def _try(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except EchelonError as error:
            self.show_fault(
                "; ".join(f"{f.what}: {f.do}" if f.do else f.what for f in error.faults)
            )
            return False
        self.show_fault("")
        return True


class ChoiceList(LinesWidget):
    """The names of a list that fit what was typed."""

    def __init__(self, names: Sequence[str], chosen: set[str]) -> None:
        super().__init__()
        self._names, self.chosen = names, chosen
        self.fitting = list(names)
        self._top = self.cursor = 0
        self.cursor = next((i for i, name in enumerate(names) if name in chosen), 0)

    def filter(self, text: str) -> None:
        """Show the names with a text in them."""
        self.fitting = [name for name in self._names if text.lower() in name.lower()]
        self.cursor = 0
        self.update_lines()

    @property
    def selected(self) -> str | None:
        """The name under the cursor."""
        return self.fitting[self.cursor] if self.cursor < len(self.fitting) else None

    def move(self, rows: int) -> None:
        """Move the cursor."""
        self.cursor = max(0, min(self.cursor + rows, len(self.fitting) - 1))
        self.update_lines()

    def make_lines(self, width: int, height: int) -> list[Strip]:
        self._top = min(max(self._top, self.cursor - height + 1), self.cursor)
        lines = []
        for number, name in enumerate(self.fitting[self._top : self._top + height], self._top):
            mark = "* " if name in self.chosen else "  "
            style = Style(reverse=True) if number == self.cursor else None
            lines.append(Strip([Segment(fit_text(mark + name, width), style)]))
        return lines or [Strip([Segment("  there is none", DIM)])]


class ChoiceScreen(Screen[list[str] | None]):
    """Asks for one of some names, or with `is_multiple` for several, chosen by space."""

    def __init__(
        self, title: str, names: Sequence[str], chosen: set[str], is_multiple: bool = False
    ) -> None:
        super().__init__()
        self._title, self._is_multiple = title, is_multiple
        self._list = ChoiceList(names, set(chosen))

    def compose(self) -> ComposeResult:
        title = OneLine()
        more = "space: choose, " if self._is_multiple else ""
        title.show(f"{self._title}  (type to search, {more}enter: take, escape: back)", "bold")
        yield title
        yield PlainInput()
        yield self._list

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._is_multiple and " " in event.value:  # no name has a blank in it
            with event.input.prevent(Input.Changed):
                event.input.value = event.value.replace(" ", "")
            if (name := self._list.selected) is not None:
                self._list.chosen ^= {name}
            self._list.update_lines()
        else:
            self._list.filter(event.value)

    def on_input_submitted(self) -> None:
        name = self._list.selected
        if self._is_multiple:
            self.dismiss(sorted(self._list.chosen) or ([name] if name else []))
        else:
            self.dismiss([name] if name is not None else None)

    def on_key(self, event: events.Key) -> None:
        moves = {"down": 1, "up": -1, "pagedown": 10, "pageup": -10}
        if event.key == "escape":
            event.stop()
            self.dismiss(None)
        elif event.key in moves:
            event.stop()
            self._list.move(moves[event.key])


class HelpScreen(Screen[None]):
    """All keys."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark,enter", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        title = OneLine()
        title.show("Keys  (escape: back)", "bold")
        yield title
        yield ScrolledLines()

    def on_mount(self) -> None:
        lines: list[Text] = []
        for name, keys in _KEYS.items():
            lines += [Text(), Text(name, BOLD)]
            for key, what in keys:
                lines.append(Text.assemble("  ", (f"{key:<22}", "cyan"), what))
        text = self.query_one(ScrolledLines)
        text.show(lines)
        text.focus()
