"""The scripts of the board's page, run by node: rows that arrive in pieces are those of the whole
answer, and a view survives its way through the address."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from echelon import board

PAGE_FOLDER = Path(board.__file__).parent / "page"
SCRIPT = Path(__file__).with_name("page_scripts.mjs")
HEAD = {"version": 1, "generation": 7, "complete": True, "defaults": {"trainer.clip": None}}
VIEWS: list[dict[str, Any]] = [
    {},
    {"filter": ["lr>=0.1", "name=a,b", "note=100%25 & more"], "q": "two words"},
    {"pin": ["0:a,b", "0:50%", "0:ü/ß?#&="], "hide": ["0:%2C"], "columns": ["lr", "accuracy.best"]},
    {"page": "run", "run": "0:<script>alert(1)</script>", "sort": "best", "reverse": "1"},
]


def run_scripts(tmp_path: Path, rows: list[dict[str, Any]], chunk_bytes: int) -> Any:
    """What the page makes of an answer with these rows, and of the views."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run the scripts of the page")
    answer = json.dumps(HEAD | {"rows": rows}, separators=(",", ":"), ensure_ascii=False)
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"answer": answer, "chunk_bytes": chunk_bytes, "views": VIEWS}))
    words = [node, str(SCRIPT), str(PAGE_FOLDER), str(case)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_rows(count: int) -> list[dict[str, Any]]:
    """Rows with texts that look like the border of two rows."""
    strange = '"},{"id":"no row ü😀\\'
    return [
        {"id": f"0:run-{i}{strange}", "name": strange, "settings": {"text": "x" * 400}}
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 9000])
@pytest.mark.slow
def test_rows_that_arrive_in_pieces_are_those_of_the_whole_answer(
    count: int, tmp_path: Path
) -> None:
    rows = make_rows(count)
    assert run_scripts(tmp_path, rows, 99_991)["rows"] == HEAD | {"rows": rows}


def test_a_setting_that_looks_like_the_border_of_rows_does_not_cut_them(tmp_path: Path) -> None:
    rows = make_rows(9000)
    for row in rows:
        row["settings"]["stages"] = [{"id": "a"}, {"id": "b" * 300}]
    assert run_scripts(tmp_path, rows, 50_021)["rows"] == HEAD | {"rows": rows}


def test_a_view_survives_its_way_through_the_address(tmp_path: Path) -> None:
    said = run_scripts(tmp_path, [], 1000)
    assert said["read"] == VIEWS
    assert said["addresses"][0] == ""
