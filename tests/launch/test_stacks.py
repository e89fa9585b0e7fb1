"""`echelon stacks` on real runs: ranks that wait, sleep, are stopped or dead, programs, hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_runner import (
    ECHELON,
    HERE,
    RunningCommand,
    is_a_sentence_and_a_hint,
    run_here,
    until,
)
from worlds import run_forked, started_forked

from echelon.errors import ExitCode
from echelon.launch.node.rank_stacks import collect_stacks, find_py_spy
from echelon.runs.process_record import identify_this_process
from echelon.runs.run_folder import RUN_FORMAT, Run
from echelon.runs.stack_report import StackReport
from echelon.runs.stack_text import find_absent_ranks, merge_stacks

LIMIT_S = 120.0
THREE = ("launch=local", "launch.procs=3", "run.name=a", "trainer.batch_size=8")
FAULTY = f"experiment={HERE / 'faulty_experiment.py'}:experiment"
SLEEPING = (*ECHELON, "train", FAULTY, *THREE, "fault=sleep", "on=1", "at=5")


def list_answers(run: Run) -> list[Path]:
    """The files that are made for an answer, and removed by who asked."""
    return list(run.folder.glob(".stacks-" + "?" * 16))


def read_report(folder: Path) -> StackReport | None:
    """What `echelon stacks a --json` prints; None where the run cannot be asked yet."""
    done = run_here(["stacks", "a", "--json"], folder)
    assert done.code == ExitCode.OK or is_a_sentence_and_a_hint(done.err), done.err
    return StackReport.from_json(json.loads(done.out)) if done.out else None


def wait_for_report(folder: Path, holds: Callable[[StackReport], Any]) -> StackReport:
    found: list[StackReport] = []

    def ask() -> bool:
        report = read_report(folder)
        found.extend([report] if report and holds(report) else [])
        return bool(found)

    until(ask, LIMIT_S, "ranks that stand there")
    return found[0]


@contextmanager
def sleeping_rank(folder: Path) -> Iterator[tuple[RunningCommand, StackReport]]:
    """Three ranks, of which rank 1 sleeps and the others wait for it in a collective."""
    with started_forked([*SLEEPING], folder) as command:
        yield command, wait_for_report(folder, _are_both_waiting)


def _are_both_waiting(report: StackReport) -> bool:
    """One may be on its way to the collective in which the other waits already."""
    return bool(find_absent_ranks(report)) and len(merge_stacks(report.ranks)) == 2


@pytest.mark.slow
def test_ranks_are_shown_by_where_they_stand(tmp_path: Path) -> None:
    with sleeping_rank(tmp_path) as (_, report):
        waiting, sleeping = merge_stacks(report.ranks)
        assert (waiting.ranks, sleeping.ranks) == ([0, 2], [1])
        collective = waiting.example.find_collective()
        assert collective is not None
        assert (collective.name, collective.backend) == ("all_reduce", "gloo")
        assert sleeping.example.main_frames[0].function == "_sleep_for_ever"
        shown = run_here(["stacks", "a", "--all-threads"], tmp_path)
        assert f"ranks 0, 2: in {collective}\n" in shown.out
        assert f"rank 1 is not in {collective}, in which ranks 0, 2 wait\n" in shown.out
        assert f"all threads of rank 1, process {report.ranks[1].pid} on " in shown.out

        # Both ways to read a stack find the same place.
        run = Run(tmp_path / "runs" / "a")
        workers = {rank.rank: rank.pid for rank in report.ranks}
        assert find_py_spy(), "the extra `dev` brings it"
        refused = tmp_path / "refused"  # as py-spy ends without the right to ptrace
        refused.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2; exit 1\n")
        refused.chmod(0o755)
        ways = [(find_py_spy(), "py-spy"), (str(refused), "itself"), (None, "itself")]
        for py_spy, source in ways:
            found = collect_stacks(run, workers, False, py_spy)
            assert {rank.source for rank in found} == {source}, found
            assert [[f[:2] for f in r.main_frames] for r in found] == [
                [f[:2] for f in r.main_frames] for r in report.ranks
            ]
            assert [rank.collectives for rank in found] == [r.collectives for r in report.ranks]
        assert list_answers(run) == []
        assert list(run.logs_folder.glob("*.stacks")) == []

        os.kill(workers[2], signal.SIGSTOP)
        for py_spy, has_stack in ((find_py_spy(), True), (None, False)):
            stopped = collect_stacks(run, workers, False, py_spy)[2]
            assert f"process {workers[2]} on {stopped.host} is stopped (SIGSTOP)" in stopped.note
            # One that was stopped while a thread changed its frames cannot be read, which is said.
            is_unreadable = has_stack and "py-spy cannot read it" in stopped.note
            assert bool(stopped.threads) == (has_stack and not is_unreadable)
        [gone] = collect_stacks(run, {0: _find_unused_pid()}, False, find_py_spy())
        assert (gone.threads, "ended meanwhile" in gone.note) == ((), True)


def _find_unused_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.slow
def test_a_hang_is_written_down_before_anything_is_killed(tmp_path: Path) -> None:
    done = run_forked([*SLEEPING, "launch.hang_s=2", "launch.max_replacements=0"], tmp_path)
    assert done.code == ExitCode.FAILED, done.err
    run = Run(tmp_path / "runs" / "a")
    [file] = run.list_hang_reports()
    assert f"The stacks of all ranks are in {file}\n" in done.err
    text = file.read_text(encoding="utf-8")
    assert "\nranks 0, 2: in all_reduce #" in text
    assert "rank 1 is not in all_reduce #" in text
    assert text.count("\nall threads of rank ") == 3
    over = run_here(["stacks", "a"], tmp_path)
    assert over.code == ExitCode.NOT_FOUND
    assert "run a has no ranks now: it is failed (rank 1: no progress for 2 s" in over.err
    assert f"hint: where all ranks stood when it hung: {file}" in over.err


PROGRAM = """\
import time
import torch
import torch.distributed as dist

def wait_long():
    time.sleep(600)

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    wait_long()
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
def test_a_program_is_read_by_py_spy_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["exec", sys.executable, "program.py"]
    words = ["run", *THREE[:1], "launch.procs=2", "run.name=a", "--", "sh", "-c"]
    with started_forked([*ECHELON, *words, f"{' '.join(command)}; true"], tmp_path):

        def stands_still(report: StackReport) -> bool:
            collectives = [str(rank.find_collective()) for rank in report.ranks]
            functions = [f.function for rank in report.ranks for f in rank.main_frames]
            return collectives[0] == "all_reduce" and "wait_long" in functions

        report = wait_for_report(tmp_path, stands_still)
        workers = {rank.rank: rank.pid for rank in report.ranks}
        for rank in collect_stacks(Run(tmp_path / "runs" / "a"), workers, True, None):
            assert (
                rank.note == "the stack of a program needs py-spy on its node: pip install py-spy"
            )


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_the_interpreter_shows_its_stack(tmp_path: Path) -> None:
    """Its thread cannot answer, but faulthandler needs no lock."""
    words = [*SLEEPING[:-3], "fault='hold lock'", "on=1", "at=5"]
    with started_forked(words, tmp_path):
        report = wait_for_report(
            tmp_path, lambda r: any(f.function == "_hold_lock" for f in r.ranks[1].main_frames)
        )
        [rank] = collect_stacks(Run(tmp_path / "runs" / "a"), {1: report.ranks[1].pid}, False, None)
        assert (rank.source, rank.collectives) == ("faulthandler", None)
        assert rank.main_frames[0].function == "_hold_lock"


# --- who cannot be asked ---


def make_run(folder: Path, **status: Any) -> Run:
    run = Run(folder / "runs" / "a")
    run.folder.mkdir(parents=True)
    run.config_file.write_text(json.dumps({"run_format": RUN_FORMAT}), encoding="utf-8")
    run.update_status(**{"started": 1.0, "world": 1} | status)
    return run


def refuse(folder: Path) -> str:
    done = run_here(["stacks", "a"], folder)
    assert done.code != ExitCode.OK
    assert is_a_sentence_and_a_hint(done.err), done.err
    return done.err


def test_runs_that_have_no_ranks(tmp_path: Path) -> None:
    assert "no run 'a' here" in refuse(tmp_path)
    run = make_run(tmp_path, state="finished", launcher="local")
    assert "run a has no ranks now: it is finished" in refuse(tmp_path)
    here = identify_this_process()
    run.update_status(state="running", process=here)
    assert "no agent of it answers" in refuse(tmp_path)
    # An agent that was killed, and left its name.
    run.stack_agent_file.write_text(json.dumps(here | {"born": "1@boot"}), encoding="utf-8")
    assert "it has not begun, or was killed" in refuse(tmp_path)


def test_somebody_who_may_not_write_there_cannot_ask(tmp_path: Path) -> None:
    here = identify_this_process()
    run = make_run(tmp_path, state="running", launcher="local", process=here)
    run.stack_agent_file.write_text(json.dumps(here), encoding="utf-8")
    run.stack_request_file.mkdir()  # root may write every file
    said = refuse(tmp_path)
    assert f"{run.stack_request_file} cannot be written" in said
    assert "as the user who started the run" in said
    assert list_answers(run) == [], "the answer's file is removed"


def test_a_run_in_one_process_elsewhere_is_asked_there(tmp_path: Path) -> None:
    process = {"host": "far", "pid": 1, "born": "1@boot"}
    make_run(tmp_path, state="running", launcher="inline", process=process)
    assert "ssh far echelon stacks" in refuse(tmp_path)


def test_a_run_in_one_process_here_is_read_by_py_spy(tmp_path: Path) -> None:
    """This very process, which runs the tests."""
    make_run(tmp_path, state="running", launcher="inline", process=identify_this_process())
    shown = run_here(["stacks", "a", "--json"], tmp_path)
    [found] = StackReport.from_json(json.loads(shown.out)).ranks
    assert (found.rank, found.pid, found.source) == (0, os.getpid(), "py-spy")
    assert any("test_a_run_in_one_process" in f.function for f in found.main_frames)
