"""Text is UTF-8 wherever we read or write it, whatever the locale of the machine says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from linear_experiment import write_linear_experiment

import echelon

SOURCES = Path(echelon.__file__).parent
IN_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

PRINT_UNICODE = """\
# Größe │ ━ ×
print("Größe │ ×")
"""


def test_no_text_file_is_left_to_the_locale() -> None:
    left = [
        f"{path.relative_to(SOURCES)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(SOURCES.rglob("*.py"))
        for call in _calls(path)
        if _is_text(call) and "encoding" not in {word.arg for word in call.keywords}
    ]
    assert left == []


def _calls(path: Path) -> Iterator[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_text(call: ast.Call) -> bool:
    """`path.read_text()`, `path.open("a")`, `open(path)`, `subprocess.run(…, text=True)`."""
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    if "utf-8" in words:
        return False
    if any(word.arg == "text" and ast.unparse(word.value) == "True" for word in call.keywords):
        return True
    match call.func:
        case ast.Attribute(attr="read_text" | "write_text"):
            return True
        case ast.Name(id="open"):
            modes = words or ["r"]
        case ast.Attribute(attr="open"):
            modes = words  # without a mode it may be anybody's `open`
        case _:
            return False
    return any(re.fullmatch(r"[rwax+]+", str(mode)) for mode in modes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ascii")
    write_linear_experiment(made / "own.py", PRINT_UNICODE)
    return made


def _typed(folder: Path, *words: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=folder,
        env=os.environ | IN_ASCII,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return ended.returncode, ended.stdout.decode(errors="replace")


@pytest.mark.slow
def test_every_verb_speaks_where_the_locale_is_ascii(folder: Path) -> None:
    own = ("train", "experiment=own.py:experiment", "trainer.epochs=1")
    for words, code, has in [
        (("train", "--dry-run"), 0, "train in this process"),
        ((*own, "run.name=inline"), 0, "Gr??e"),
        ((*own, "run.name=local", "launch=local", "launch.procs=2"), 0, "finished"),
        (("show", "inline"), 0, "inline"),
        (("logs", "inline"), 0, "Gr??e"),
        (("logs", "local"), 0, "Gr??e"),
        (("runs",), 0, "inline"),
        (("jobs",), 0, "inline"),
        (("explain",), 0, "cpu"),
        (("doctor", "--help"), 0, "usage"),
        (("gpus", "--help"), 0, "usage"),
        (("show", "größe"), 3, "no run"),
    ]:
        got, said = _typed(folder, *words)
        assert (got, has in said, "Traceback" in said) == (code, True, False), said
    log = folder / "runs" / "inline" / "logs" / "rank-0.log"
    assert "Größe │ ×" in log.read_text(encoding="utf-8")
