"""How runs stand, what they say, and how they are ended from outside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runner import ECHELON, CommandResult, run_here, until
from worlds import run_forked, started_forked

from echelon.errors import ExitCode
from echelon.jobs import follow as following
from echelon.jobs.cancel import cancel_runs
from echelon.jobs.follow import PlainPrinter
from echelon.jobs.log_reader import LogFile, LogLine, merge_logs
from echelon.jobs.logs import PrefixedPrinter
from echelon.runs.process_record import (
    _read_start_time,
    identify_this_process,
    is_alive,
    send_signal,
)
from echelon.runs.run_folder import RUN_FORMAT, Run
from echelon.runs.status import read_run_status

LONG = ("train", "launch=local", "launch.procs=2", "run.name=a", "trainer.steps=1000000")
NOT_THERE = {"host": socket.gethostname(), "pid": 1, "born": "another"}


def echelon(folder: Path, *words: str, **variables: Any) -> CommandResult:
    return run_here(words, folder, **variables)


def jobs(folder: Path, *words: str, **variables: str) -> list[dict[str, Any]]:
    done = echelon(folder, "jobs", "--json", *words, **variables)
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def only(folder: Path) -> dict[str, Any]:
    (found,) = jobs(folder)
    return found


def make_run(folder: Path, name: str = "a", **status: Any) -> Run:
    made = Run(folder / "runs" / name)
    made.logs_folder.mkdir(parents=True)
    made.config_file.write_text(json.dumps({"run_format": RUN_FORMAT}))
    made.status_file.write_text(json.dumps(status))
    return made


# --- a cluster made of scripts: what Slurm said, and how often it was asked ---


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Commands that answer so; the variables under which they are found."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def answering(squeue: str = "", sacct: str | None = None) -> dict[str, str]:
        accounts = f"echo '{sacct}'" if sacct is not None else "echo disabled >&2; exit 1"
        for name, answer in (("squeue", f"echo '{squeue}'"), ("sacct", accounts)):
            script = folder / name
            script.write_text(f"#!/bin/sh\necho {name} >> {folder}/asked\n{answer}\n")
            script.chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    return answering


def test_a_trial_is_cancelled_without_its_worker(
    tmp_path: Path, slurm: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose job goes on with the next one: scancel is not called, and not there."""
    status: dict[str, Any] = {
        **{"state": "running", "launcher": "slurm", "job": "7_0", "in_sweep": True}
    }
    trial = make_run(tmp_path, **status)
    ended = make_run(tmp_path, "b", **status)
    ended.exit_code_file.write_text("0\n")
    monkeypatch.setenv("PATH", slurm("7_0|RUNNING|None")["PATH"])
    assert cancel_runs([trial, ended], now=False) == 0
    assert trial.cancel_file.exists()
    assert not ended.cancel_file.exists()


@pytest.mark.parametrize(
    ("squeue", "sacct", "status", "files", "state", "note"),
    [
        ("7|PENDING|Resources", None, {"state": "queued"}, {}, "queued", "Resources"),
        ("7|PENDING|BeginTime", None, {"starts": [1]}, {}, "requeued", "BeginTime"),
        ("7|RUNNING|None", None, {"state": "queued"}, {}, "running", ""),
        ("7|COMPLETING|None", None, {"state": "running"}, {"exit": "0"}, "finished", ""),
        ("7|RUNNING|None", None, {}, {"cancelled": ""}, "running", "asked to end"),
        ("7|FAILED|None", None, {"state": "running"}, {}, "failed", "script was killed"),
        ("7|TIMEOUT|None", None, {"state": "running"}, {}, "failed", "out of time"),
        ("", "7|CANCELLED by 1000", {"state": "running"}, {}, "cancelled", ""),
        ("", "7|NODE_FAIL", {"state": "running"}, {}, "lost", "a node went down"),
        ("", "7|OUT_OF_MEMORY", {"state": "running"}, {}, "failed", "out of memory"),
        ("", "7|COMPLETED", {"state": "finished"}, {}, "finished", ""),
        ("", None, {"state": "running"}, {}, "lost", "left the queue"),
        ("", None, {"state": "running"}, {"exit": "1"}, "failed", "exit code 1"),
        ("", None, {"state": "preempted"}, {"exit": "75"}, "preempted", ""),
        ("", None, {"state": "preempted"}, {"exit": "75", "cancelled": ""}, "cancelled", ""),
        ("", None, {"state": "running"}, {"cancelled": ""}, "cancelled", ""),
        ("7|RUNNING|None", None, {"state": "pruned"}, {"exit": "75"}, "pruned", ""),
        ("", None, {"state": "pruned"}, {"exit": "75", "cancelled": ""}, "pruned", ""),
    ],
)
def test_a_job_is_what_the_queue_then_accounting_then_its_folder_say(
    tmp_path: Path,
    slurm: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    squeue: str,
    sacct: str | None,
    status: dict[str, Any],
    files: dict[str, str],
    state: str,
    note: str,
) -> None:
    made = make_run(tmp_path, launcher="slurm", job="7", nodes=2, world=8, **status)
    for name, text in files.items():
        (made.folder / name).write_text(text)
    monkeypatch.setenv("PATH", slurm(squeue, sacct)["PATH"])
    found = read_run_status(made)
    assert found.state == state
    assert note in found.note


@pytest.mark.parametrize("answer", ["7|FAILED|None", ""])
def test_a_job_that_ends_while_slurm_is_asked_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The folder was read before; the batch script writes the code while squeue runs."""
    made = make_run(tmp_path, launcher="slurm", job="7", state="queued")
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "squeue"
    script.write_text(f"#!/bin/sh\necho 8 > '{made.exit_code_file}'\necho '{answer}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    found = read_run_status(made)
    assert (found.state, found.exit) == ("failed", 8)


def test_a_silent_controller_loses_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, launcher="slurm", job="7", state="running")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "squeue").write_text("#!/bin/sh\necho cannot contact controller >&2\nexit 1\n")
    (folder / "squeue").chmod(0o755)
    done = echelon(tmp_path, "jobs", PATH=f"{folder}:{os.environ['PATH']}")
    assert "running" in done.out
    assert "cannot contact controller" in done.err


def test_a_thousand_runs_are_one_question(
    tmp_path: Path, slurm: Callable[..., dict[str, str]]
) -> None:
    states = "\n".join(f"{n}|RUNNING|None" for n in range(0, 1000, 2))
    variables = slurm(states, "")
    for n in range(1000):
        status = {"launcher": "slurm", "job": str(n), "state": "running", "started": float(n)}
        make_run(tmp_path, f"r{n}", **status, step=1)
    done = echelon(tmp_path, "jobs", **variables)
    assert (tmp_path / "bin/asked").read_text().split() == ["squeue", "sacct"]
    assert done.out.count("running") == 500
    assert done.out.count("lost") == 5
    assert done.out.splitlines()[1].startswith("r999"), "newest first"
    assert done.out.splitlines()[-1] == "and 495 more: --all"


def test_what_is_damaged_is_shown_and_breaks_nothing(tmp_path: Path) -> None:
    texts = [
        "",
        "{",
        "[1]",
        '"x"',
        '{"state": 5, "job": {}, "step": "x", "failure": 1}',
        "\x00\xff",
    ]
    for n, text in enumerate(texts):
        made = make_run(tmp_path, f"r{n}")
        made.status_file.write_text(text)
        made.metrics_file.write_text('{"step": "x", "time": null}\n{"st')
    assert {found["state"] for found in jobs(tmp_path)} == {"unknown"}
    assert echelon(tmp_path, "jobs").code == 0
    assert jobs(tmp_path, "--dir", "nowhere") == []


# --- processes ---


def test_a_process_is_known_by_its_birth() -> None:
    me = identify_this_process()
    assert is_alive(me)
    assert is_alive(me | {"born": "at another time"}) is False
    assert is_alive(me | {"host": "elsewhere"}) is None
    assert is_alive(None) is None


def test_a_stranger_with_the_same_number_is_never_signalled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        process = identify_this_process() | {"pid": stranger.pid, "born": "before"}
        assert not send_signal(process, signal.SIGKILL)
        make_run(tmp_path, state="running", launcher="local", process=process)
        assert only(tmp_path)["state"] == "lost"
        assert "nothing to cancel" in echelon(tmp_path, "cancel", "a", "--now").out
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_a_run_elsewhere_is_ended_there(tmp_path: Path) -> None:
    elsewhere = {"host": "n7", "pid": 1, "born": "x"}
    made = make_run(tmp_path, state="running", launcher="local", process=elsewhere)
    assert "local on n7" in echelon(tmp_path, "jobs").out
    done = echelon(tmp_path, "cancel", "a")
    assert done.code == ExitCode.USAGE
    assert f"ssh n7 echelon cancel {made.folder}" in done.err
    assert not made.cancel_file.exists()


def test_runs_that_are_not_there(tmp_path: Path) -> None:
    make_run(tmp_path, "apple", state="finished")
    for verb in ("cancel", "logs", "attach"):
        done = echelon(tmp_path, verb, "aple")
        assert done.code == ExitCode.NOT_FOUND
        assert "did you mean 'apple'" in done.err


# --- logs ---


def make_logs(folder: Path, stamps: str = "", **texts: str) -> Run:
    made = make_run(folder, state="finished", world=2, nodes=1)
    for name, text in texts.items():
        (made.logs_folder / f"{name.replace('_', '-')}.log").write_text(text)
    made.get_stamps_file(0).write_text(stamps)
    return made


def shown(folder: Path, *words: str) -> list[str]:
    done = echelon(folder, "logs", "a", *words)
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_logs_are_merged_in_order_of_time(tmp_path: Path) -> None:
    stamps = "10.0 rank-0 2\n11.0 rank-1 4\n12.0 rank-0 6\n"
    make_logs(tmp_path, stamps, rank_0="a\nb\nc\n", rank_1="A\nB\nC")
    assert shown(tmp_path) == [
        f"rank {r} │ {text}" for r, text in zip("011001", "aABbcC", strict=True)
    ]
    assert shown(tmp_path, "--lines", "3") == ["rank 0 │ b", "rank 0 │ c", "rank 1 │ C"]
    assert shown(tmp_path, "--rank", "1") == ["A", "B", "C"]
    assert shown(tmp_path, "--node", "0") == shown(tmp_path)


def test_rank_0_is_not_shown_twice(tmp_path: Path) -> None:
    make_logs(tmp_path, node_0="agent\nhello\n", rank_0="hello\n", rank_1="other\n", job="end\n")
    told = shown(tmp_path)
    assert sorted(told) == ["   job │ end", "rank 0 │ agent", "rank 0 │ hello", "rank 1 │ other"]
    assert shown(tmp_path, "--rank", "0") == ["hello"]


def test_what_all_ranks_say_at_once_is_shown_once(tmp_path: Path) -> None:
    report = "Traceback\n  one\n  two\nrank 1 failed\n"
    make_logs(tmp_path, "1.0 rank-0 99\n1.1 rank-1 99\n", rank_0=report, rank_1=report + "mine\n")
    assert shown(tmp_path)[-2:] == ["rank 1 │ … 4 lines as above", "rank 1 │ mine"]
    assert len(shown(tmp_path)) == 6


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    make_logs(tmp_path, rank_0="x\n")
    done = echelon(tmp_path, "logs", "a", "--rank", "3")
    assert done.code == ExitCode.NOT_FOUND
    assert "no log of rank 3" in done.err
    assert "there are rank-0" in done.err


def test_the_last_lines_are_the_last_lines_of_any_file(tmp_path: Path) -> None:
    """Against the plain way, over block borders, long lines and missing ends."""
    made, dice = make_run(tmp_path), random.Random(0)
    for _ in range(60):
        lines = [b"x" * int(dice.expovariate(1 / 20_000)) for _ in range(dice.randrange(12))]
        data = b"\n".join(lines) + dice.choice([b"", b"\n"])
        made.get_rank_log_file(0).write_bytes(data)
        log, count = LogFile(made, "rank-0"), dice.randrange(14)
        log.seek_to_last_lines(count)
        expected = data.splitlines(keepends=True)[-count:] if count else []
        assert b"".join(line.text for line in merge_logs(made, [log], count)) == b"".join(expected)


def measure_log_memory(run: Run, last: int | None) -> tuple[int, int]:
    """How many bytes of text were shown, and the peak of memory meanwhile."""
    printer = PrefixedPrinter(run)
    tracemalloc.start()
    with contextlib.redirect_stdout(io.TextIOWrapper(io.FileIO(os.devnull, "w"))):
        shown_bytes = 0
        for line in merge_logs(run, [LogFile(run, "rank-0"), LogFile(run, "rank-1")], last):
            shown_bytes += len(line.text)
            printer.print_log_line(line)
        printer.flush()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return shown_bytes, peak


@pytest.mark.parametrize(
    ("text", "stamps", "limit_mib"),
    [
        (b"the same again\n" * 50_000, 1, 1),
        (b"".join(b"%099d\n" % number for number in range(20_000)), 1, 2),
        (b"#" * (32 << 20), 1, 12),
        (b"x\n", 10_000, 1),
    ],
    ids=["equal lines", "different lines", "no line ends", "many stamps"],
)
@pytest.mark.slow
def test_a_large_log_is_shown_in_little_memory(
    tmp_path: Path, text: bytes, stamps: int, limit_mib: int
) -> None:
    """A list of these lines or stamps would be several times as large."""
    made = make_run(tmp_path, world=2)
    made.get_stamps_file(0).write_text("".join(f"{n}.0 rank-0 {n}\n" for n in range(stamps)))
    made.get_rank_log_file(0).write_bytes(text)
    made.get_rank_log_file(1).write_bytes(b"other\n")
    shown_bytes, peak = measure_log_memory(made, None)
    assert shown_bytes == len(text) + 6, "nothing is lost"
    assert peak < limit_mib << 20


def test_a_line_that_is_still_written_is_read_once_it_ends(tmp_path: Path) -> None:
    """Over the borders of blocks, too, which are read one by one."""
    made = make_run(tmp_path)
    path, log = made.get_rank_log_file(0), LogFile(made, "rank-0")
    path.write_bytes(b"a\n" + b"b" * 200_000)
    assert list(log.read_lines()) == [b"a\n"]
    with path.open("ab") as file:
        file.write(b"c\nd")
    assert list(log.read_lines()) == [b"b" * 200_000 + b"c\n"]
    assert list(log.read_lines(include_partial=True)) == [b"d"]


# --- runs that run ---


class Ear(PlainPrinter):
    """Hears a run out whose process closes its trackers, says some more and ends."""

    def __init__(self, run: Run, process: subprocess.Popen[bytes]) -> None:
        self.heard, self._run, self._process, self._pauses = b"", run, process, 0

    def print_log_line(self, line: LogLine) -> None:
        self.heard += line.text

    def flush(self) -> None:
        self._pauses += 1
        if self._pauses == 3:
            self._run.get_rank_log_file(0).write_text("finished\nlast words\n")
            self._process.communicate(timeout=300)


def test_a_run_that_closes_its_trackers_is_heard_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_FINAL_OUTPUT_S", 0.0)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    its = identify_this_process() | {"pid": process.pid, "born": _read_start_time(process.pid)}
    run = make_run(tmp_path, state="finished", process=its, updated=time.time())
    run.logs_folder.mkdir(exist_ok=True)
    run.get_rank_log_file(0).write_text("finished\n")
    ear = Ear(run, process)
    try:
        assert following.follow_run(run, lambda: ["rank-0"], ear, 20).state == "finished"
    finally:
        process.kill()
        process.wait()
    assert ear.heard == b"finished\nlast words\n"


slow = pytest.mark.slow


@slow
def test_a_run_is_seen_cancelled_and_goes_on(tmp_path: Path) -> None:
    folder = Run(tmp_path / "runs/a")
    with started_forked([*ECHELON, *LONG], tmp_path) as training:
        until(lambda: only_if(tmp_path).get("eta_s"), 300, "an ETA")
        found = only(tmp_path)
        assert (found["state"], found["launcher"], found["nodes"]) == ("running", "local", 1)
        assert (found["world"], found["total_steps"]) == (2, 1_000_000)
        done = echelon(tmp_path, "cancel", "a", "latest")
        assert (done.code, done.out) == (
            0,
            f"run a: process {training.process.pid} was asked to save and end\n",
        )
        assert training.wait().code == ExitCode.PREEMPTED
    assert only(tmp_path)["state"] == "cancelled"
    assert "nothing to cancel" in echelon(tmp_path, "cancel", "a").out
    steps = folder.find_newest_step()
    done = run_forked([*ECHELON, "resume", "a", f"trainer.steps={steps + 5}"], tmp_path)
    assert done.code == 0, done.err
    assert only(tmp_path)["state"] == "finished"


def only_if(folder: Path) -> dict[str, Any]:
    found = jobs(folder)
    return found[0] if found else {}


@slow
def test_a_run_whose_process_is_gone_is_lost(tmp_path: Path) -> None:
    with started_forked([*ECHELON, *LONG], tmp_path) as training:
        until(lambda: only_if(tmp_path).get("step"), 300, "a step")
        os.kill(training.process.pid, signal.SIGKILL)
        training.wait()
    assert only(tmp_path)["state"] == "lost"


@slow
def test_killed_now(tmp_path: Path) -> None:
    with started_forked([*ECHELON, *LONG], tmp_path) as training:
        until(lambda: only_if(tmp_path).get("step"), 300, "a step")
        assert "was killed" in echelon(tmp_path, "cancel", "a", "--now").out
        assert training.wait().left == []
    assert only(tmp_path)["state"] == "cancelled"


SPEAK = (
    "import os, time; [print(i, os.environ['RANK'], flush=True) or time.sleep(0.1) for i in 'ab']"
)


@slow
def test_logs_are_followed_from_before_the_first_word_to_the_end(tmp_path: Path) -> None:
    queued = make_run(tmp_path, state="queued", launcher="slurm")
    queued.job_log_file.write_text("queued\n")
    program = ("--", sys.executable, "-c", SPEAK)
    with started_forked([*ECHELON, "logs", "a", "-f"], tmp_path) as follower:
        until(lambda: "queued" in follower.read_output(), 300, "it is followed")
        words = ("run", "launch=local", "launch.procs=2", "run.name=a", *program)
        done = run_forked([*ECHELON, *words], tmp_path)
        assert done.code == 0, done.err
        told = follower.wait()
    assert told.code == 0
    lines = ["   job │ queued", *(f"rank {r} │ {word} {r}" for word in "ab" for r in "01")]
    assert sorted(told.out.splitlines()) == sorted(lines)
    found = only(tmp_path)
    assert (found["state"], found["launcher"], found["world"]) == ("finished", "local", 2)


@slow
def test_a_run_has_one_writer_and_cancel_ends_it(tmp_path: Path) -> None:
    inline = [word for word in LONG if not word.startswith("launch")]
    with started_forked([*ECHELON, *inline], tmp_path) as training:
        until(lambda: only_if(tmp_path).get("step"), 300, "a step")
        config = Run(tmp_path / "runs/a").config_file.read_bytes()
        for words in (inline, LONG):
            done = run_forked([*ECHELON, *words], tmp_path)
            assert done.code == ExitCode.USAGE
            assert f"run a is running already, as process {training.process.pid} on" in done.err
        assert Run(tmp_path / "runs/a").config_file.read_bytes() == config
        assert (only(tmp_path)["state"], only(tmp_path)["launcher"]) == ("running", "inline")
        assert "was asked to save and end" in echelon(tmp_path, "cancel", "a").out
        assert training.wait().code == ExitCode.PREEMPTED
    assert "run a was not running: it is cancelled" in echelon(tmp_path, "cancel", "a").out


@slow
@pytest.mark.parametrize("code", [0, 3])
def test_attach_ends_as_the_program_does(tmp_path: Path, code: int) -> None:
    wait = "import os, sys, time\nprint('here', flush=True)\n"
    wait += f"while not os.path.exists('go'):\n    time.sleep(0.05)\nsys.exit({code})"
    words = ("run", "launch=local", "launch.procs=2", "run.name=a", "--", sys.executable, "-c")
    with started_forked([*ECHELON, *words, wait], tmp_path) as program:
        until(lambda: Run(tmp_path / "runs/a").get_rank_log_file(0).exists(), 300, "a log")
        with started_forked([*ECHELON, "attach", "a"], tmp_path) as attached:
            until(lambda: "here" in attached.read_output(), 300, "attached")
            (tmp_path / "go").touch()
            done = attached.wait()
        assert program.wait().code == done.code == code
    assert done.out.splitlines()[0] == "here"
