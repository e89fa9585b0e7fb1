"""One browser for all tests of a process, a training that was really made, and boards over it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from board_pages import PACED, OpenBoard
from board_runs import RunTemplate, read_template
from board_server import RunningBoard, run_board
from browser import Browser, require_browser, start_browser
from command_runner import ECHELON
from worlds import run_forked


@pytest.fixture(scope="session")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    require_browser()
    with start_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(_browser: Browser) -> Iterator[Browser]:
    """A browser as if it was new. At the end nothing may have gone wrong in any page of it."""
    _browser.reset()
    yield _browser
    _browser.leave_pages()
    assert _browser.errors == []


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = run_forked([*ECHELON, *PACED, "run.name=paced", "trainer.steps=40"], folder)
    assert done.code == 0, done.output
    return folder / "runs" / "paced"


@pytest.fixture(scope="session")
def template(_trained: Path) -> RunTemplate:
    """What a real training of 40 steps left."""
    return read_template(_trained)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder of runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def trained(_trained: Path, root: Path) -> Path:
    """The run of that training, in the folder of runs."""
    shutil.copytree(_trained, root / "paced", symlinks=True)
    return root / "paced"


@pytest.fixture
def saved(browser: Browser, tmp_path: Path) -> Path:
    """Where files go that a page saves."""
    folder = tmp_path / "saved"
    browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    return folder


@pytest.fixture
def open_board(browser: Browser, tmp_path: Path) -> Iterator[OpenBoard]:
    """Start a board on a folder, and open a view of it in the browser."""
    with ExitStack() as stack:

        def start(root: Path, words: Sequence[str] = (), view: str = "") -> RunningBoard:
            board = stack.enter_context(
                run_board(str(root), *words, cache=tmp_path / "cache", cwd=root.parent)
            )
            browser.open(f"{board.url}&{view}")
            return board

        yield start
        browser.leave_pages()
