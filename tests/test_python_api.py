"""`echelon.submit`: commands and functions as jobs, from Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.config.compose import compose
from echelon.errors import EchelonError, ExitCode
from echelon.python_api import Job, make_launch_overrides
from echelon.runs.run_folder import Run
from echelon.submission.call_function import call_function_of_run, write_call

WORK = """
import math, os, sys, time

def scale(x, by=1):
    print("scaling")
    with open("out.txt", "w") as file:
        file.write(os.environ.get("WORLD_SIZE", "alone"))
    return {"y": [x * by], "pair": (1, None), "nan": math.nan}

def fail(x):
    raise ValueError(f"{x} is too much")

def return_set():
    return {"a": [{1}]}

def return_number_keys():
    return {1: 2}

def leave():
    sys.exit(0)

def work_for_ever():
    open("begun", "w").close()
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which a person types, with functions in work.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


def told(action: Callable[[], Any]) -> str:
    with pytest.raises(EchelonError) as caught:
        action()
    return str(caught.value)


@pytest.mark.slow
def test_jobs_on_this_machine(here: Path) -> None:
    """Two at once: one returns, the other raises; then a command, and one that is cancelled."""
    good = echelon.submit("work.py:scale", [3], {"by": 2}, launch="local", name="a")
    bad = echelon.submit("work:fail", [3], launch="local", name="a")
    assert (good.run, bad.run) == ("a", "a.2")
    result = good.result()
    assert result.pop("nan") != 0
    assert result == {"y": [6], "pair": [1, None]}
    assert (good.state, good.wait(), good.logs()) == ("finished", 0, "scaling\n")
    assert (good.folder / "work" / "out.txt").read_text() == "alone"
    problem = told(bad.result)
    assert problem.startswith("run a.2: ValueError: 3 is too much\n")
    assert "  |     raise ValueError" in problem, "the end of the log"
    assert bad.state == "failed"
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "b c"]
    assert echelon.submit(words, launch="local").result() == "['b c']\n"


@pytest.mark.slow
def test_several_processes_and_a_job_that_is_cancelled(here: Path) -> None:
    both = echelon.submit("work.py:scale", [1], launch="local", procs=2)
    endless = echelon.submit("work.py:work_for_ever", launch="local")
    assert both.result()["y"] == [1]
    assert (both.folder / "work" / "out.txt").read_text() == "2"
    with pytest.raises(TimeoutError, match=f"run {endless.run} is "):
        endless.wait(timeout_s=0)
    endless.cancel()
    assert endless.wait() == ExitCode.PREEMPTED
    assert endless.state == "cancelled"
    assert f"run {endless.run}: cancelled with exit code 75" in told(endless.result)


def test_what_cannot_be_submitted(here: Path) -> None:
    def refused(*given: Any, **settings: Any) -> str:
        return told(lambda: echelon.submit(*given, **{"launch": "local", **settings}))

    assert "kwargs['x'][0] is of type set" in refused("work.py:scale", kwargs={"x": [{1}]})
    assert "a key of args[0] is 1, of type int" in refused("work.py:scale", [{1: 2}])
    assert "is a command, and args and kwargs are for a function" in refused("ls -l", [1])
    assert 'give its path as a text: "json:dumps"' in refused(json.dumps)
    assert "did you mean 'launch.nodes'?" in refused("ls", nods=2)
    assert "none.py is not in" in refused("none.py:scale")
    assert "was given 2 commands" in refused("ls\nls")
    assert "a pipe" in refused("ls | cat")
    assert "launch=inline: commands are submitted to Slurm" in refused("ls", launch="inline")
    assert not (here / "runs").exists()


def test_settings_arrive_as_they_were_given(here: Path) -> None:
    given = {"time": "4:00:00", "sbatch": ["--a=b c", "--c=it's"], "nodes": 2, "partition": None}
    launch = compose(["launch=slurm", *make_launch_overrides({**given, "preflight": True})]).launch
    assert (launch.time, launch.nodes, launch.partition) == ("4:00:00", 2, None)
    assert (launch.sbatch, launch.preflight) == (["--a=b c", "--c=it's"], True)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("return_set", "the result['a'][0] is of type set"),
        ("return_number_keys", "a key of the result is 1, of type int"),
        ("nowhere", "has no function nowhere"),
    ],
)
def test_what_a_function_may_not_return(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    problem: str,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "work", raising=False)
    run = Run(here / "runs" / "a")
    run.folder.mkdir(parents=True)
    write_call(run, {"function": f"work.py:{function}", "args": [], "kwargs": {}})
    assert call_function_of_run(run) == ExitCode.FAILED
    monkeypatch.delitem(sys.modules, "work", raising=False)
    assert problem in json.loads(run.result_file.read_text())["error"]
    assert problem in capsys.readouterr().err
    run.update_status(state="failed", launcher="local")
    assert problem in told(Job(run).result)


def test_a_function_that_ends_its_process_has_no_result(here: Path) -> None:
    run = Run(here / "runs" / "a")
    run.folder.mkdir(parents=True)
    write_call(run, {"function": "work.py:leave", "args": [], "kwargs": {}})
    run.update_status(state="finished", launcher="local")
    assert "run a: its function ended the process" in told(Job(run).result)
