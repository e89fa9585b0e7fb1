"""The screen of one run: what `echelon show` prints, curves, settings, time line, logs."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from echelon.board.request import RequestError
from echelon.board.run_page import read_details
from echelon.board.terminal.curve_panel import CurvePanel, CurveScreen, CurveView, DrawnRun
from echelon.board.terminal.lines import LinesWidget, OneLine, ScrolledLines, clean_ansi, clean_text
from echelon.board.terminal.log_pane import LogPane
from echelon.board.terminal.prompts import ChoiceScreen, HelpScreen, PromptBar
from echelon.board.terminal.row_values import format_steps, is_active, list_metrics
from echelon.errors import EchelonError
from echelon.jobs.logs import list_log_names
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_bytes, format_timestamp
from echelon.views.run_settings import format_setting_value
from echelon.views.table import STATE_STYLES

if TYPE_CHECKING:
    from echelon.board.terminal.app import TerminalBoard

_TABS = ("overview", "curves", "settings", "timeline", "snapshots", "logs")
_ALL_LOGS = "(what echelon logs shows)"
_MAX_WIDTH = 200
_MIN_PAUSE_S = 1.0
_KIND_STYLES = {
    **{"fault": "red", "lost": "red", "hang": "red", "machine": "yellow", "slow": "yellow"},
    **{"finished": "blue", "start": "green", "train": "green", "joined": "green", "ok": "green"},
}
_HINTS = {
    "curves": "m metric  l log axis  s smooth  x axis  + - zoom  [ ] move",
    "logs": "/ search  n N next  f ranks",
}


class RunScreen(CurveScreen):
    """One run, in tabs."""

    CSS = """
    RunScreen > Container { height: 1fr; }
    RunScreen ScrolledLines, RunScreen CurvePanel, RunScreen LogPane { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(n), f"show('{name}')", name) for n, name in enumerate(_TABS, 1)),
        ("tab", "show_next(1)", "next"),
        ("shift+tab", "show_next(-1)", "before"),
        ("slash", "search", "search"),
        ("f", "choose_logs", "ranks"),
        ("question_mark", "help", "help"),
        ("escape,q,backspace", "dismiss", "back"),
    ]

    def __init__(self, run_id: str, view: CurveView) -> None:
        super().__init__()
        self._run_id = run_id
        self._tab = "overview"
        self._view = view
        self._wanted = threading.Event()
        self._is_ending = threading.Event()
        self._pause_s = _MIN_PAUSE_S
        self._search_text = ""

    @property
    def board_app(self) -> TerminalBoard:
        """The program."""
        return cast("TerminalBoard", self.app)

    def compose(self) -> ComposeResult:
        app = self.board_app
        yield OneLine(id="title")
        yield OneLine(id="tabs")
        with Container():
            for name in _TABS:
                if name == "curves":
                    yield CurvePanel(app.find_run, app.is_unicode, not app.no_color, id=name)
                elif name == "logs":
                    yield LogPane(self._find_run, id=name)
                else:
                    yield ScrolledLines(id=name)
        yield PromptBar()
        yield OneLine(id="keys")

    def on_mount(self) -> None:
        self.board_app.watched.ids = (self._run_id,)
        row = self.board_app.rows.get(self._run_id, {})
        drawn = DrawnRun(self._run_id, row.get("name", self._run_id), 0, is_active(row))
        self.curves.show(replace(self._view, runs=(drawn,)))
        for name in ("overview", "settings", "timeline", "snapshots"):
            self.query_one(f"#{name}", ScrolledLines).show([Text("  reading…", "dim")])
        self._show_title()
        self.action_show("overview")
        threading.Thread(target=self._keep_reading, name="board-run", daemon=True).start()
        self._wanted.set()

    def on_unmount(self) -> None:
        self._is_ending.set()
        self._wanted.set()

    def _find_run(self) -> Run:
        return self.board_app.find_run(self._run_id)

    # --- what is heard ---

    def take_rows(self, changed: set[str] | None) -> None:
        """Show what has changed of the run; all may have for None."""
        if changed is None or self._run_id in changed:
            self._show_title()
            self._wanted.set()
            self.query_one(LogPane).read_again()

    def take_growth(self, kind: str, run_ids: list[str]) -> None:
        """Read curves or logs again that have grown."""
        if self._run_id in run_ids and kind == "metrics":
            self.curves.read_again()
        elif self._run_id in run_ids:
            self.query_one(LogPane).read_again()

    def _show_title(self) -> None:
        row = self.board_app.rows.get(self._run_id)
        if row is None:
            self.query_one("#title", OneLine).show(f"{self._run_id} is gone", "red")
            return
        title = Text(clean_text(row["name"]), "bold")
        state = row["state"]
        title.append("  ").append(state, f"not bold {STATE_STYLES.get(state, '')}".strip())
        title.append(f"  {format_steps(row)}", "not bold")
        self.query_one("#title", OneLine).show(title)

    # --- tabs ---

    def list_metrics(self) -> list[str]:
        row = self.board_app.rows.get(self._run_id)
        return [] if row is None else list_metrics([row])

    def action_show(self, name: str) -> None:
        self._tab = name
        for other in _TABS:
            self.query_one(f"#{other}", LinesWidget).display = other == name
        shown = self.query_one(f"#{name}", LinesWidget)
        if shown.can_focus:
            shown.focus()
        else:
            self.set_focus(None)
        self._show_tabs()

    def action_show_next(self, tabs: int) -> None:
        self.action_show(_TABS[(_TABS.index(self._tab) + tabs) % len(_TABS)])

    def _show_tabs(self) -> None:
        line = Text()
        for number, name in enumerate(_TABS, 1):
            line.append(f" {number} {name} ", "reverse" if name == self._tab else "dim")
        self.query_one("#tabs", OneLine).show(line)
        keys = self.query_one("#keys", OneLine)
        hint = _HINTS.get(self._tab, "up down left right scroll")
        if self._tab == "logs":
            hint = f"{self.query_one(LogPane).describe()}  {hint}"
        keys.show(f"{hint}  escape back  ? help", "dim")

    def on_log_pane_changed(self) -> None:
        if self._tab == "logs":
            self._show_tabs()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    # --- logs ---

    def action_search(self) -> None:
        self.action_show("logs")
        bar = self.query_one(PromptBar)
        bar.ask("search:", self._search_text, self._search)

    def _search(self, text: str | None) -> None:
        self._search_text = text or ""
        pane = self.query_one(LogPane)
        pane.search(self._search_text)
        pane.focus()

    def action_choose_logs(self) -> None:
        self.action_show("logs")
        pane = self.query_one(LogPane)
        try:
            names = list_log_names(self._find_run())
        except RequestError:
            return
        screen = ChoiceScreen("Show which logs?", [_ALL_LOGS, *names], set(pane.names), True)
        self.app.push_screen(screen, self._choose_logs)

    def _choose_logs(self, names: list[str] | None) -> None:
        if names is not None:
            self.query_one(LogPane).choose([name for name in names if name != _ALL_LOGS])

    # --- reading ---

    def _keep_reading(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_ending.is_set():
                return
            began = time.monotonic()
            texts = self._read_texts()
            if self._is_ending.is_set():
                return
            self.app.call_from_thread(self._take, texts)
            self._is_ending.wait(max(_MIN_PAUSE_S, 5 * (time.monotonic() - began)))

    def _read_texts(self) -> dict[str, list[Text]]:
        width = min(_MAX_WIDTH, self.size.width)
        try:
            run = self._find_run()
            row = self.board_app.rows.get(self._run_id, {})
            if row.get("source", "echelon") != "echelon":
                return _describe_foreign_row(row)
            ask_slurm = self.board_app.board.ask_slurm
            details = read_details(run, ask_slurm)
            return {
                "overview": _print_overview(run, ask_slurm, width),
                "settings": _list_settings(details["all_settings"]),
                "timeline": _list_timeline(details["timeline"]),
                "snapshots": _list_snapshots(details["snapshots"]),
            }
        except RequestError as error:
            return {"overview": [Text(f"  {error.what}", "red")]}
        except EchelonError as error:
            return {"overview": [Text(f"  {fault.what}", "red") for fault in error.faults]}
        except OSError as error:
            return {"overview": [Text(f"  {format_os_error_reason(error)}", "red")]}

    def _take(self, texts: dict[str, list[Text]]) -> None:
        for name, lines in texts.items():
            self.query_one(f"#{name}", ScrolledLines).show(lines)


def _print_overview(run: Run, ask_slurm: Callable[[Sequence[str]], Any], width: int) -> list[Text]:
    """Return what `echelon show` prints, without its curves."""
    from echelon.views.run_details import RunDetails, print_details

    file = io.StringIO()
    screen = Console(
        file=file,
        width=width,
        force_terminal=True,
        color_system="standard",
        soft_wrap=True,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    print_details(RunDetails.read_summarized(run, ask_slurm), screen, width)
    return [clean_ansi(line) for line in file.getvalue().splitlines()]


def _describe_foreign_row(row: dict[str, Any]) -> dict[str, list[Text]]:
    """Return what is known of a run of another program."""
    facts = {key: row.get(key) for key in ("source", "state", "folder", "step", "host", "note")}
    overview = [
        Text(f"  {key:<12}{clean_text(format_setting_value(value))}")
        for key, value in facts.items()
        if value not in (None, "")
    ]
    numbers = [
        Text(f"  {clean_text(name):<24} last {last:g}  min {low:g}  max {high:g}")
        for name, (last, low, high, *_) in row.get("metrics", {}).items()
        if None not in (last, low, high)
    ]
    settings = [
        {"name": name, "value": value, "default": False}
        for name, value in sorted(row.get("settings", {}).items())
    ]
    return {
        "overview": [*overview, Text(), *numbers],
        "settings": _list_settings(settings),
        "timeline": _list_timeline([]),
        "snapshots": _list_snapshots([]),
    }


def _list_settings(settings: Sequence[dict[str, Any]]) -> list[Text]:
    """Return the settings, those that are not the default first."""
    changed = [each for each in settings if not each["default"]]
    others = [each for each in settings if each["default"]]
    size = max((len(each["name"]) for each in settings), default=0)
    lines: list[Text] = []
    for title, found, style in (("changed", changed, "bold"), ("by default", others, "dim")):
        if found:
            lines += [Text(title, "underline")]
            lines += [
                Text(
                    clean_text(f"  {each['name']:<{size}}  {format_setting_value(each['value'])}"),
                    style,
                )
                for each in found
            ]
    return lines or [Text("  no settings", "dim")]


def _list_timeline(events: Sequence[dict[str, Any]]) -> list[Text]:
    """Return what happened, the newest first."""
    lines = []
    for event in reversed(events):
        line = Text(f"  {format_timestamp(event['t'])}  ", "dim")
        line.append(f"{event['kind']:<9}", f"not dim {_KIND_STYLES.get(event['kind'], '')}".strip())
        step = "" if event["step"] is None else f"step {event['step']:.10g}"
        line.append(f"{step:<13} ").append(clean_text(event["text"]), "not dim")
        lines.append(line)
    return lines or [Text("  nothing is known of it", "dim")]


def _list_snapshots(snapshots: Sequence[dict[str, Any]]) -> list[Text]:
    """Return the snapshots, the newest first, each with what to type to go on from it."""
    lines = []
    for each in reversed(snapshots):
        best = "  best" if each["best"] else ""
        saved = "" if each["saved"] is None else format_timestamp(each["saved"])
        size = format_bytes(each["bytes"])
        lines += [
            Text(f"  step {each['step']:<10} {size:>9}  {saved}{best}", "bold" if best else ""),
            Text(f"    {clean_text(each['resume_command'])}", "dim"),
        ]
    return lines or [Text("  no snapshots", "dim")]
