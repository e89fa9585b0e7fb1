"""`echelon submit launch=local`: the commands of a file on this machine, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_runner import ECHELON, start

from echelon.errors import Exit
from echelon.runs.run_folder import Run

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("A"), os.environ.get("WORLD_SIZE")]))
sys.exit(9 * (sys.argv[1:] == ["fail"]))
"""


def test_commands_run_here_as_they_would_in_jobs(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    lines = [
        f"A='x y' {sys.executable} tell.py 'b c'",
        f"{sys.executable} tell.py fail",
        "# echelon: expand",
        f"{sys.executable} tell.py $ONE-$TWO",
        "torchrun --nproc_per_node=2 tell.py both",
    ]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    words = ("submit", "--configs", "all.txt", "launch=local", "--name", "a")
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "ONE": "1 *", "TWO": "2"}
    done = start([*ECHELON, *words], tmp_path, **path).wait()
    assert done.code == 9, done.err
    assert done.left == []
    copy = str(tmp_path / "runs" / "a" / "source")
    told = [json.loads(_log(tmp_path, n).splitlines()[0]) for n in range(4)]
    assert told[0] == [["b c"], copy, "x y", None]
    assert told[2] == [["1 *-2"], copy, None, None]
    assert told[3] == [["both"], copy, None, "2"]
    refused = start([*ECHELON, "resume", "a-0"], tmp_path).wait()
    assert refused.code == Exit.USAGE
    assert "submit the command again" in refused.err


def _log(folder: Path, number: int) -> str:
    return Run(folder / "runs" / f"a-{number}").rank_log_file(0).read_text()
