"""The box of the board's page means by a condition what `echelon runs --filter` means: both are
asked the same questions about the same run folders."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from filter_cases import CASES, CASES_FILE, make_runs, require_answer
from run_folders import echelon

from echelon import board
from echelon.board.run_rows import get_default_settings, read_row_text
from echelon.errors import ExitCode

FILTERS_SCRIPT = Path(board.__file__).parent / "page" / "filters.js"


def test_filters_of_the_command_line_meet_the_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path)
    for case in CASES["filters"]:
        words = [word for text in case["filter"] for word in ("--filter", text)]
        code, out, err = echelon_json(capsys, tmp_path, *words)
        assert code == (ExitCode.OK if "keeps" in case else ExitCode.USAGE), (case, err)
        require_answer(case, out, " ".join(err.split()))


def test_orders_of_the_command_line_meet_the_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path)
    for case in CASES["orders"]:
        _, names, err = echelon_json(capsys, tmp_path, "--sort", case["sort"])
        assert names == case["names"], (case, err)


def test_filters_and_orders_of_the_page_meet_the_cases(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run the script of the page")
    rows = [
        json.loads(read_row_text(str(run.folder)).render(0, b""))
        for run in make_runs(tmp_path / "runs")
    ]
    rows_file = tmp_path / "rows.json"
    rows_file.write_text(json.dumps({"rows": rows, "defaults": get_default_settings()}))
    words = [str(Path(__file__).with_name("filter_cases.mjs")), str(FILTERS_SCRIPT)]
    done = subprocess.run(
        [node, *words, str(CASES_FILE), str(rows_file)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for case, answer in zip(CASES["filters"], answers["filters"], strict=True):
        require_answer(case, answer.get("names"), answer.get("said", ""), answer.get("hint", ""))
    for case, answer in zip(CASES["orders"], answers["orders"], strict=True):
        assert answer.get("names") == case["names"], (case, answer)


def echelon_json(
    capsys: pytest.CaptureFixture[str], root: Path, *words: str
) -> tuple[int, list[str] | None, str]:
    """`echelon runs --all --json WORDS`: its code, the names of the runs, and what it said."""
    code, out, err = echelon(capsys, "runs", "--all", "--json", "--dir", str(root), *words)
    names = [run["run"] for run in json.loads(out)["runs"]] if out else None
    return code, names, err
