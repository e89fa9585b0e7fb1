"""The table of docs/ports.md says how long the ports are, and none is longer than a peer's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_as_the_files_are() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "ports" / "count_lines.py")]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert table in (ROOT / "docs" / "ports.md").read_text()
    for row in table.splitlines()[2:]:
        _, name, ours, *of_peers, _ = (cell.strip() for cell in row.split("|"))
        counts = [int(count) for count in of_peers if count != "–"]
        assert all(int(ours) <= count for count in counts), name
