"""The board in a terminal, by its keys: what is on the screen, what is written, what is sent."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filter_cases import CASES, make_runs, require_answer
from run_folders import STARTED, echelon, lines, make_run, write_phases
from textual.pilot import Pilot

from echelon.board.run_rows import get_default_settings, read_row_text
from echelon.board.server import Board
from echelon.board.terminal.app import TerminalBoard
from echelon.board.terminal.lines import LinesWidget, clean_ansi, clean_text
from echelon.board.terminal.log_pane import LogPane
from echelon.board.terminal.row_values import RowQuery, sort_rows
from echelon.board.terminal.runs_table import RunTable
from echelon.errors import EchelonError, ExitCode
from echelon.runs.annotations import annotate_run, read_annotations
from echelon.runs.run_folder import Run
from echelon.views.text_chart import ASCII, BRAILLE, ChartCurve, ChartWindow, draw_chart

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NO_COLOR", raising=False)


def read_screen(app: TerminalBoard) -> str:
    """What is on the screen, without what is typed."""
    widgets = app.screen.query(LinesWidget)
    return "\n".join(w.get_text() for w in widgets if w.display and w.size.height)


async def wait_for(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait until something is so, as the screen shows it."""
    app = pilot.app
    assert isinstance(app, TerminalBoard)
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, read_screen(app)
        await pilot.pause(0.02)


def use_board(
    root: Path,
    use: Callable[[TerminalBoard, Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (100, 30),
) -> None:
    """Open the board of a folder, and leave it after its use."""

    async def open_and_use() -> None:
        app = TerminalBoard(Board([root]), is_unicode=True)
        async with app.run_test(size=size) as pilot:
            await wait_for(pilot, lambda: app.is_complete)
            await pilot.pause()
            await use(app, pilot)

    asyncio.run(open_and_use())


def shows(app: TerminalBoard, text: str) -> Callable[[], bool]:
    return lambda: text in read_screen(app)


def list_names(app: TerminalBoard) -> list[str]:
    """The runs of the table, in its order."""
    return [word for word in read_screen(app).split() if word.startswith(("run-", "seed-"))]


def make_some_runs(root: Path) -> list[Run]:
    """Runs of two learning rates, of which one has failed."""
    runs = []
    for number, lr in enumerate((0.1, 0.1, 0.01)):
        said = {"started": STARTED + 100 * number, "state": "failed" if number == 1 else "finished"}
        runs.append(make_run(root, f"run-{number}", lines(), status=said, lr=lr, seed=number))
    return runs


# --- the table ---


def test_table_is_filtered_sorted_and_grouped_by_keys(tmp_path: Path) -> None:
    make_some_runs(tmp_path)

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        await wait_for(pilot, lambda: list_names(app)[:3] == ["run-2", "run-1", "run-0"])
        assert "✗ failed" in read_screen(app)
        # 1. A filter that means nothing says so, and stays to be corrected.
        await pilot.press("slash", *"lr>=x")
        await wait_for(pilot, shows(app, "'x' is not a number"))
        await pilot.press("backspace", *"0.05", "enter")
        await wait_for(pilot, shows(app, "2 of 3 runs"))
        assert list_names(app)[:2] == ["run-1", "run-0"]
        await pilot.press("slash", *" lrr=1")
        await wait_for(pilot, shows(app, "no run has 'lrr'"))
        assert "did you mean 'lr'" in read_screen(app)
        await pilot.press("escape")  # what was there before stands
        await wait_for(pilot, shows(app, "2 of 3 runs"))
        await pilot.press("slash", *" failed", "enter")
        await wait_for(pilot, shows(app, "1 of 3 runs"))
        await pilot.press("escape")
        await wait_for(pilot, shows(app, "  3 runs"))
        # 2. In another order.
        await pilot.press("r")
        await wait_for(pilot, lambda: list_names(app)[:3] == ["run-0", "run-1", "run-2"])
        await pilot.press("o", *"lr", "enter")
        await wait_for(pilot, lambda: list_names(app)[:3] == ["run-2", "run-1", "run-0"])
        assert "lr▾" in read_screen(app)
        # 3. In groups, which are opened.
        await pilot.press("b", *"lr", "enter")
        await wait_for(pilot, shows(app, "▸ lr=0.1 (2)"))
        await pilot.press("end", "enter")
        await wait_for(pilot, shows(app, "▾ lr=0.1 (2)"))
        assert "1 failed, 1…" in read_screen(app)

    use_board(tmp_path, use, (120, 30))


def test_filters_and_orders_of_the_terminal_meet_the_cases(tmp_path: Path) -> None:
    rows = [
        json.loads(read_row_text(str(run.folder)).render(0, b"")) for run in make_runs(tmp_path)
    ]
    defaults = get_default_settings()
    for case in CASES["filters"]:
        if case.get("says") == "is not a condition":
            continue  # here it is a word that is searched for
        try:
            text = " ".join(f"'{word}'" for word in case["filter"])
            found = RowQuery.parse(text).select(rows, defaults)
        except EchelonError as error:
            fault = error.faults[0]
            require_answer(case, None, f"{fault.what} {fault.do}", fault.do)
        else:
            names = [row["name"] for row in sort_rows(found, "when", False, defaults)]
            require_answer(case, names, "")
    for case in CASES["orders"]:
        if "names" in case:
            found = sort_rows(rows, case["sort"], False, defaults)
            assert [row["name"] for row in found] == case["names"], case


@pytest.mark.slow
def test_ten_thousand_rows_are_drawn_where_they_are_in_sight(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run-0", lines())
    row = json.loads(read_row_text(str(run.folder)).render(0, b""))

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        table = app.screen.query_one(RunTable)
        rows = [row | {"id": f"0:run-{n}", "name": f"run-{n}"} for n in range(10_000)]
        app._replace_rows(rows, True)
        await wait_for(pilot, shows(app, "10,000 runs"))
        await pilot.press("home")
        await pilot.press(*["pagedown"] * 3, "end")
        await wait_for(pilot, lambda: table.cursor == 9_999)
        assert table.get_text().count("run-") == table.size.height - 1
        await pilot.press("slash", *"name=run-77", "enter")
        await wait_for(pilot, shows(app, "1 of 10,000 runs"))

    use_board(tmp_path, use)


def test_runs_that_come_and_go_are_shown_while_it_is_open(tmp_path: Path) -> None:
    make_some_runs(tmp_path)

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        run = make_run(tmp_path, "run-9", lines(), status={"started": STARTED + 900})
        await wait_for(pilot, lambda: list_names(app)[:1] == ["run-9"])
        annotate_run(run, "from elsewhere", ["seen"], [])
        await wait_for(pilot, lambda: app.rows["0:run-9"]["note"] == "from elsewhere")
        await pilot.press("home", "enter")
        await wait_for(pilot, shows(app, "METRIC"))
        shutil.rmtree(run.folder)
        await wait_for(pilot, shows(app, "is gone"))
        await pilot.press("escape")
        await wait_for(pilot, shows(app, "3 runs"))
        assert "run-9" not in read_screen(app)

    use_board(tmp_path, use)


def test_notes_and_tags_are_written_into_the_run(tmp_path: Path) -> None:
    run = make_some_runs(tmp_path)[2]
    annotate_run(run, "old", ["old"], [])

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        await pilot.press("n", *"er one", "enter")
        await wait_for(pilot, shows(app, "older one"))
        await pilot.press("t", "space", *"a*b", "enter")
        await wait_for(pilot, shows(app, "cannot be a tag"))
        await pilot.press(*["backspace"] * 3, *"new", "enter")
        await wait_for(pilot, shows(app, "old,new"))
        assert read_annotations(run).note == "older one"
        await pilot.press("t", "ctrl+u", *"new", "enter")
        await wait_for(pilot, lambda: read_annotations(run).tags == ("new",))
        await pilot.press("n", "x", "escape")
        assert read_annotations(run).note == "older one"

    use_board(tmp_path, use, (160, 30))


@pytest.mark.parametrize("size", [(12, 4), (40, 12), (80, 24), (220, 60)])
@pytest.mark.slow
def test_every_size_of_a_terminal_can_be_used(tmp_path: Path, size: tuple[int, int]) -> None:
    make_some_runs(tmp_path)

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        for key in ("space", "z", "z", "z", "question_mark", "escape", "enter", *"123456"):
            await pilot.press(key)
            await pilot.pause()
        assert all(len(line) <= size[0] for line in read_screen(app).splitlines())

    use_board(tmp_path, use, size)


# --- curves ---


def test_curves_of_chosen_runs_are_drawn_and_zoomed(tmp_path: Path) -> None:
    make_some_runs(tmp_path)

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        await wait_for(pilot, lambda: "⠤" in read_screen(app) or "⣀" in read_screen(app))
        assert "● run-2" in read_screen(app)  # the selected one
        await pilot.press("space", "down", "space")
        await wait_for(pilot, shows(app, "● run-2  ● run-0"))
        await pilot.press("m")
        await wait_for(pilot, shows(app, "\neval_acc"))
        await pilot.press("M", *"loss", "enter")
        await wait_for(pilot, shows(app, "\nloss"))
        await pilot.press("plus")
        await wait_for(pilot, shows(app, "zoomed to 10.75 – 30.25"))
        await pilot.press("right_square_bracket")
        await wait_for(pilot, shows(app, "zoomed to 15.625 – 35.125"))
        await pilot.press("0")
        await wait_for(pilot, shows(app, "logarithmic"))  # as it spans two decades
        await pilot.press("l")
        await wait_for(pilot, lambda: "logarithmic" not in read_screen(app))
        await pilot.press("s", "x")
        await wait_for(pilot, shows(app, "smoothed 0.6"))
        await wait_for(pilot, shows(app, "epoch 4"))
        await pilot.press("c")
        await wait_for(pilot, lambda: "● run-2  ● run-0" not in read_screen(app))

    use_board(tmp_path, use)


def test_no_point_of_a_chart_is_lost() -> None:
    spike = ChartCurve([0, 1, 2, 3, 4, 5], [0.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    flat = ChartCurve([0, 5], [0.0, 0.0])
    window = ChartWindow(0, 5, 0.0, 9.0)
    chart = draw_chart([flat, spike], window, 29, 5, BRAILLE)
    text = ["".join(part for part, _ in line) for line in chart]
    assert [len(line) for line in text] == [29] * 7
    assert text[0].startswith("       9┤")
    assert text[0][9:].strip()  # the spike reaches the top
    assert next(owner for _, owner in chart[4] if owner is not None) == 0  # the first is on top
    # Of what begins outside, the part inside is drawn, from the very edge.
    half = draw_chart([spike], ChartWindow(2.5, 5, 0.0, 9.0), 29, 5, ASCII)
    rows = ["".join(part for part, _ in line)[9:] for line in half]
    assert rows[2][0] != " "


def test_colours_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_some_runs(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        await pilot.press("space", "space")
        await wait_for(pilot, shows(app, "a run-2  b run-1"))
        chart = read_screen(app).partition("a run-2")[2]
        await wait_for(pilot, lambda: "aaa" in read_screen(app))
        assert "●" not in chart

    use_board(tmp_path, use)


# --- one run ---


def test_a_run_is_shown_as_echelon_show_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_some_runs(tmp_path)[2]
    write_phases(run, (STARTED + 3, STARTED + 40, 0, 40))
    _, said, _ = echelon(capsys, "show", str(run.folder))
    head = [line.split() for line in said.splitlines() if line.startswith("  progress")]

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "3 runs"))
        await pilot.press("enter")
        await wait_for(pilot, shows(app, "METRIC"))
        shown = read_screen(app)
        assert [line.split() for line in shown.splitlines() if "progress" in line] == head
        for word in ("experiment", "settings", "eval_loss", "lowest"):
            assert word in said
            assert word in shown
        await pilot.press("3")
        await wait_for(pilot, shows(app, "changed"))
        assert "lr" in read_screen(app).partition("by default")[0]
        await pilot.press("tab")
        await wait_for(pilot, shows(app, "stopped by SIGTERM"))
        await pilot.press("5")
        await wait_for(pilot, shows(app, "no snapshots"))
        await pilot.press("2")
        await wait_for(pilot, lambda: "⣀" in read_screen(app) or "⠤" in read_screen(app))
        await pilot.press("question_mark")
        await wait_for(pilot, shows(app, "Keys"))
        await pilot.press("q", "q")
        await wait_for(pilot, shows(app, "3 runs"))

    use_board(tmp_path, use)


@pytest.mark.slow
def test_logs_are_searched_followed_and_chosen_by_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run-0", lines())
    for rank in (0, 1):
        text = "".join(f"line {n} of rank {rank}\n" for n in range(500))
        (run.logs_folder / f"rank-{rank}.log").write_text(text + "\x1b[31mred\x1b[0m \x1b[2Jend\n")

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "1 run"))
        await pilot.press("enter", "6")
        await wait_for(pilot, shows(app, "following"))
        assert "of 1,002" in read_screen(app)
        assert "red ^[[2Jend" in read_screen(app)  # the colour is one, the other escape is shown
        await pilot.press("slash", *"line 7 of", "enter")
        await wait_for(pilot, shows(app, "of 2 found"))
        await wait_for(pilot, shows(app, "▸line 7 of rank"))
        await pilot.press("n")
        await wait_for(pilot, shows(app, "2 of 2 found"))
        await pilot.press("slash", "ctrl+u", *"/line 4[0-9]{2} /", "enter")
        await wait_for(pilot, shows(app, "of 200 found"))
        await pilot.press("f", *"rank-1", "space", "enter")
        await wait_for(pilot, shows(app, "of 501"))
        assert "of rank 0" not in app.screen.query_one(LogPane).get_text()
        await pilot.press("G")
        with (run.logs_folder / "rank-1.log").open("a") as file:
            file.write("a line that comes later\n")
        await wait_for(pilot, shows(app, "a line that comes later"))
        await pilot.press("g")
        await wait_for(pilot, shows(app, "line 0 of rank 1"))

    use_board(tmp_path, use)


def test_text_of_others_moves_no_cursor(tmp_path: Path) -> None:
    assert clean_text("a\x1b[2J\x07\t\u202eb\x9b") == "a^[[2J^G    <202E>b<9B>"
    assert clean_text("Größe") == "Größe"
    found = clean_ansi("\x1b[1;31mred\x1b[0m\x1b]0;title\x07")
    assert found.plain == "red^[]0;title^G"
    assert found.spans
    run = make_run(tmp_path, "run-\x1b[2J", lines(), lr="\x1b]0;x\x07")
    annotate_run(run, "\x1b[31mnote", [], [])

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "^[[2J"))
        await pilot.press("enter", "3")
        await wait_for(pilot, shows(app, "changed"))
        for widget in app.screen.query(LinesWidget):
            assert "\x1b" not in widget.get_text()

    use_board(tmp_path, use)


# --- the command ---


def test_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, said = echelon(capsys, "board", "--tui", str(tmp_path))
    assert code == ExitCode.USAGE
    assert "needs a terminal" in said
    assert "echelon runs" in said
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, said = echelon(capsys, "board", "--tui", str(tmp_path))
    assert code == ExitCode.USAGE
    assert "pip install 'echelon[board]'" in said


class BoardTerminal:
    """`echelon board --tui` in a terminal of its own, and all that it sent."""

    def __init__(self, root: Path, **env: str) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        words = [sys.executable, "-m", "echelon", "board", "--tui", str(root)]
        self.process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"} | env,
        )
        os.close(slave)
        self._master = master
        self.sent = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read(self, wait_s: float) -> bytes:
        """What it sends, until it sends nothing for so long."""
        found = b""
        while select.select([self._master], [], [], wait_s)[0]:
            try:
                found += os.read(self._master, 1 << 16)
            except OSError:  # it has ended
                break
        self.sent += found
        return found

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.sent:
            assert time.monotonic() < deadline, self.sent
            self.read(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)


@contextmanager
def open_terminal(root: Path, **env: str) -> Iterator[BoardTerminal]:
    terminal = BoardTerminal(root, **env)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.slow
def test_a_plain_terminal_gets_plain_signs_and_nothing_while_nothing_changes(
    tmp_path: Path,
) -> None:
    make_some_runs(tmp_path)
    with open_terminal(tmp_path, LC_ALL="C", NO_COLOR="1") as terminal:
        terminal.wait_for(b"run-2")
        terminal.wait_for(b"step 40")
        while terminal.read(1.0):
            pass
        assert terminal.sent.isascii()
        colours = {f"\x1b[{n}m".encode() for n in (*range(30, 38), *range(90, 98))}
        assert not [code for code in colours if code in terminal.sent]
        assert not terminal.read(2.0)  # not a byte
        terminal.type("q")
        assert terminal.process.wait(LIMIT_S) == ExitCode.OK


@pytest.mark.slow
def test_a_training_is_followed_while_it_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    words = ["train", f"run.dir={root}", "run.name=run-live", "trainer.epochs=1000000"]
    training: list[Any] = []

    async def use(app: TerminalBoard, pilot: Pilot[None]) -> None:
        await wait_for(pilot, shows(app, "no runs yet"))
        training.append(
            subprocess.Popen(
                [sys.executable, "-m", "echelon", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        await wait_for(pilot, shows(app, "▶ running"))
        await wait_for(pilot, shows(app, "1 running"))
        await wait_for(pilot, lambda: app.rows["0:run-live"]["step"])
        step = app.rows["0:run-live"]["step"]
        await wait_for(pilot, lambda: app.rows["0:run-live"]["step"] > step)
        await wait_for(pilot, shows(app, "● run-live"))
        await wait_for(pilot, lambda: "⣀" in read_screen(app) or "⠤" in read_screen(app))
        await pilot.press("enter", "6")
        await wait_for(pilot, shows(app, "following"))
        pane = app.screen.query_one(LogPane)
        await wait_for(pilot, lambda: "evaluated" in pane.get_text())
        before = pane.get_text()
        await wait_for(pilot, lambda: pane.get_text() != before)
        await pilot.press("escape")
        training[0].terminate()
        await wait_for(pilot, lambda: "▶ running" not in read_screen(app))

    try:
        use_board(root, use)
    finally:
        for process in training:
            process.kill()
            process.wait()
