"""A closed standard stream is as good as /dev/null: `echelon train >&-`, or a bare daemon."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import command_runner
import pytest
from command_runner import ECHELON, TWO, CommandResult, only_run, status
from linear_experiment import write_linear_experiment

CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
ALL = CLOSED[-1]

REPORT_STREAMS = """\
import json, os
with open(f"streams-{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump([os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)], file)
print("printed", flush=True)
"""
CHILD = """\
import subprocess, sys
from echelon.utils.streams import open_missing_streams

open_missing_streams()
with open("first", "w") as first:
    print("printed", flush=True)
    tell = "import os; print(*map(os.readlink, ['/proc/self/fd/%d' % n for n in (0, 1, 2)]),"
    subprocess.run([sys.executable, "-c", tell + " file=open('links', 'w'))"])
    sys.exit(first.fileno())
"""


def _run_with_closed(closed: str, folder: Path, *words: str) -> CommandResult:
    return command_runner.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], folder)


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("command", ["runs", "gpus"])
@pytest.mark.slow
def test_a_command_prints_on_the_other_streams(command: str, closed: str, tmp_path: Path) -> None:
    as_always = command_runner.run([*ECHELON, command], tmp_path)
    ended = _run_with_closed(closed, tmp_path, *ECHELON, command)
    assert ended.err == ("" if "2>&-" in closed.split() else as_always.err)
    assert ended.out == ("" if ">&-" in closed.split() else as_always.out)
    assert ended.code == as_always.code


def test_an_error_does_not_go_to_stdout_instead(tmp_path: Path) -> None:
    ended = _run_with_closed("2>&-", tmp_path, *ECHELON, "show", "nothing")
    assert (ended.code, ended.out, ended.err) == (3, "", "")


def test_no_file_becomes_a_stream_and_children_have_all_three(tmp_path: Path) -> None:
    ended = _run_with_closed(ALL, tmp_path, sys.executable, "-c", CHILD)
    assert ended.code > 2
    assert (tmp_path / "first").read_text() == ""
    assert (tmp_path / "links").read_text().split() == [os.devnull] * 3


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ALL])
def test_a_training_ends_as_always(closed: str, tmp_path: Path) -> None:
    """Of a user's own file, whose imports came before us."""
    write_linear_experiment(tmp_path / "own.py", REPORT_STREAMS)
    ended = _run_with_closed(closed, tmp_path, sys.executable, "own.py", "trainer.epochs=1")
    assert ended.code == 0, ended.out + ended.err
    assert "Traceback" not in ended.out + ended.err
    assert ("printed" in ended.out) == (">&-" not in closed.split())
    _require_finished(tmp_path)
    links = json.loads((tmp_path / "streams-0.json").read_text())
    closed_numbers = [("<&-", ">&-", "2>&-").index(each) for each in closed.split()]
    assert [links[number] for number in closed_numbers] == [os.devnull] * len(closed_numbers)


@pytest.mark.slow
def test_a_training_on_two_processes_ends_as_always(tmp_path: Path) -> None:
    write_linear_experiment(tmp_path / "own.py", REPORT_STREAMS)
    words = ("experiment=own.py:experiment", "trainer.epochs=1", *TWO)
    ended = _run_with_closed(ALL, tmp_path, *ECHELON, "train", *words)
    assert (ended.code, ended.left) == (0, [])
    _require_finished(tmp_path)
    for rank in (0, 1):
        links = json.loads((tmp_path / f"streams-{rank}.json").read_text())
        log = str(only_run(tmp_path) / "logs" / f"rank-{rank}.log")
        assert set(links) <= {os.devnull, log}


def _require_finished(folder: Path) -> None:
    run = only_run(folder)
    assert status(run)["state"] == "finished"
    log = (run / "logs" / "rank-0.log").read_text()
    assert "printed" in log
    assert "Traceback" not in log
