"""Text is UTF-8 wherever we read or write it, whatever the locale of the machine says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
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


TYPE_ALL = """\
import json, sys
from echelon.cli import run_and_report_faults, run_command
for words in json.loads(sys.argv[1]):
    try:
        code = run_and_report_faults(lambda: run_command(words))
    except SystemExit as request:
        code = request.code
    print(f"=== ended with {int(code or 0)}", flush=True)
"""


def _type_all(folder: Path, commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each, in one interpreter, of which the locale is a property."""
    ended = subprocess.run(
        [sys.executable, "-c", TYPE_ALL, json.dumps(commands, ensure_ascii=False)],
        cwd=folder,
        env=os.environ | IN_ASCII,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    text = ended.stdout.decode(errors="replace")
    pieces = re.split(r"^=== ended with (\d+)\n", text, flags=re.MULTILINE)
    assert pieces.pop() == "", text
    return [(int(code), said) for said, code in zip(pieces[::2], pieces[1::2], strict=True)]


@pytest.mark.slow
def test_every_verb_speaks_where_the_locale_is_ascii(folder: Path) -> None:
    own = ("train", "experiment=own.py:experiment", "trainer.epochs=1")
    expected = [
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
    ]
    found = _type_all(folder, [words for words, _, _ in expected])
    for (words, code, has), (got, said) in zip(expected, found, strict=True):
        assert (got, has in said, "Traceback" in said) == (code, True, False), (words, said)
    log = folder / "runs" / "inline" / "logs" / "rank-0.log"
    assert "Größe │ ×" in log.read_text(encoding="utf-8")
