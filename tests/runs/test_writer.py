"""One writer per run folder: who has it, who may share it, and how it is freed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_runner import until
from run_folders import make_run

from echelon.config.schema import Config, RunConfig
from echelon.errors import EchelonError, ExitCode
from echelon.jobs.cancel import cancel_runs
from echelon.runs import writer
from echelon.runs.create import create_run
from echelon.runs.process_record import identify_this_process
from echelon.runs.run_folder import Run
from echelon.runs.writer import claim_run_folder, find_writer, release_run_folder
from echelon.utils.locks import is_locked

_CLAIM = """
import sys
from pathlib import Path
from echelon.runs.run_folder import Run
from echelon.runs.writer import claim_run_folder, start_writer_beats
claim_run_folder(Run(Path(sys.argv[1])))
"""
_WAIT = "print('claimed', flush=True)\nsys.stdin.read()\n"


@contextmanager
def holder(run: Run, script: str = _CLAIM + _WAIT) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed the folder, and is no parent of this one."""
    words = [sys.executable, "-c", script, str(run.folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = make_run(tmp_path, "a", status={"state": "failed"})
    yield made
    release_run_folder(made)


def require_refusal(run: Run, who: str) -> None:
    with pytest.raises(EchelonError) as raised:
        claim_run_folder(run)
    (fault,) = raised.value.faults
    assert f"run a is {who}" in fault.what
    for way in ("another run.name", "echelon attach", f"echelon cancel {run.folder}"):
        assert way in fault.do
    assert not is_locked(run.writer_file) or find_writer(run) is not None


# --- processes of this machine ---


@pytest.mark.slow
def test_a_second_writer_is_refused_until_the_first_is_gone_however_it_ends(run: Run) -> None:
    with holder(run) as process:
        who = f"process {process.pid} on {socket.gethostname()}"
        require_refusal(run, f"running already, as {who}")
        assert str(find_writer(run)) == who
        process.kill()
        process.wait()
        assert find_writer(run) is None
        claim_run_folder(run)


def test_a_claim_is_released_in_order(run: Run) -> None:
    claim_run_folder(run)
    claim_run_folder(run)
    assert find_writer(run) is None, "it is this process"
    assert is_locked(run.writer_file)
    release_run_folder(run)
    assert not is_locked(run.writer_file)
    assert run.writer_file.read_bytes() == b""
    release_run_folder(run)


def test_a_process_that_the_writer_started_shares_its_folder(run: Run) -> None:
    claim_run_folder(run)
    script = _CLAIM + "sys.exit(7)"
    done = subprocess.run([sys.executable, "-c", script, str(run.folder)])
    assert done.returncode == 7
    assert is_locked(run.writer_file), "and leaves it to the writer"


def test_a_forked_child_that_outlives_the_writer_does_not_keep_the_folder(run: Run) -> None:
    """A loader's process notices the end of a killed rank only after some seconds."""
    fork = "import os\nif os.fork():\n    signal.pause()\n"
    with holder(run, "import signal\n" + _CLAIM + fork + _WAIT) as process:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert not process.stdin.closed, "the child reads from it"
        claim_run_folder(run)


@pytest.mark.slow
def test_the_command_of_ssh_shares_its_folder_with_its_agents_and_nobody_else(run: Run) -> None:
    with holder(run) as process:
        require_refusal(run, f"running already, as process {process.pid}")
        run.update_status(process=json.loads(run.writer_file.read_text())["process"])
        claim_run_folder(run, shares_with_command=True)
        require_refusal(run, f"running already, as process {process.pid}")


def test_a_refused_start_changes_nothing_in_the_folder(run: Run) -> None:
    config = replace(Config(), run=RunConfig(name="a", dir=str(run.folder.parent)))
    run.job_id_file.write_text("7\n")
    for resume in ("auto", "never"):
        with holder(run):
            before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
            with pytest.raises(EchelonError, match="running already"):
                create_run(replace(config, trainer=replace(config.trainer, resume=resume)))
            after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
        assert after == before
    assert [path.name for path in run.folder.parent.iterdir()] == ["a"]


@pytest.mark.slow
def test_an_inline_start_is_refused_before_torch_is_imported(run: Run) -> None:
    script = "import sys; sys.modules['torch'] = None; from echelon.cli import main; main()"
    words = ["train", "run.name=a", f"run.dir={run.folder.parent}"]
    with holder(run) as process:
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True
        )
        assert done.stderr.startswith(
            f"error: run a is running already, as process {process.pid} on "
        )
    assert done.returncode == ExitCode.USAGE


def test_a_writer_that_ends_within_a_moment_is_not_seen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PATIENCE_S", 60.0)
    with holder(run) as process:
        threading.Timer(0.2, process.kill).start()
        assert find_writer(run) is None


def test_a_run_that_is_set_aside_leaves_the_claim_to_the_new_one(run: Run) -> None:
    named = replace(Config(), run=RunConfig(name="a", dir=str(run.folder.parent)))
    fresh = replace(named, trainer=replace(named.trainer, resume="never"))
    for _ in range(2):
        create_run(fresh)
        assert is_locked(run.writer_file)
    old = [Run(run.folder.with_name(f"a.{n}")) for n in (1, 2)]
    assert [is_locked(each.writer_file) for each in old] == [False, False]


def test_a_start_that_is_refused_for_another_reason_frees_the_folder(run: Run) -> None:
    named = replace(Config(), run=RunConfig(name="a", dir=str(run.folder.parent)))
    with pytest.raises(EchelonError, match="is a run of the experiment"):
        create_run(replace(named, experiment={"entry": "another.py:one"}))
    assert not is_locked(run.writer_file)


def test_without_locks_the_record_decides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, flags: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "no locks")

    with holder(run) as process:
        monkeypatch.setattr(fcntl, "flock", refuse)
        require_refusal(run, f"running already, as process {process.pid}")
        process.kill()
        process.wait()
        claim_run_folder(run)
    record = json.loads(run.writer_file.read_text())
    assert record["process"] == identify_this_process()


# --- other machines ---


def write_record(run: Run, **more: Any) -> None:
    process = {"host": "elsewhere", "pid": 1, "born": "x"}
    run.writer_file.write_text(json.dumps({"process": process, **more}))


def test_a_writer_on_a_machine_that_shares_no_locks_is_known_by_its_beats(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(run)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.01):
            os.utime(run.writer_file)

    far_away = threading.Thread(target=beat)
    far_away.start()
    try:
        require_refusal(run, "running already, as process 1 on elsewhere")
    finally:
        is_over.set()
        far_away.join()
    assert "still writes into" in capsys.readouterr().err
    monkeypatch.setattr(writer, "_WATCH_S", 0.1)
    claim_run_folder(run)
    assert json.loads(run.writer_file.read_text())["process"] == identify_this_process()


def is_changed(file: Path, before_ns: int) -> bool:
    return file.stat().st_mtime_ns != before_ns


def test_a_writer_beats(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_BEAT_S", 0.01)
    claim_run_folder(run)
    writer.start_writer_beats(run)
    for _ in range(2):
        before = run.writer_file.stat()
        until(partial(is_changed, run.writer_file, before.st_mtime_ns), 60, "a beat")
    release_run_folder(run)
    assert "echelon-writer" not in [thread.name for thread in threading.enumerate()]


# --- jobs ---


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A squeue that answers so."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for variable in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(variable, raising=False)

    def answering(answer: str) -> None:
        (folder / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "squeue").chmod(0o755)

    return answering


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "SUSPENDED", "REQUEUED"])
def test_a_job_in_the_queue_is_the_writer_before_it_has_a_process(
    run: Run, squeue: Callable[[str], None], state: str
) -> None:
    run.update_status(launcher="slurm", job="7", state="queued")
    squeue(f"echo '7|{state}|None'")
    require_refusal(run, "queued or running already, as job 7")
    squeue("echo '7|COMPLETED|None'")
    claim_run_folder(run)


def test_a_job_is_not_refused_its_own_run(
    run: Run, squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.update_status(launcher="slurm", job="7", state="queued")
    squeue("echo '7|RUNNING|None'")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    claim_run_folder(run)


def test_nobody_is_asked_about_a_job_that_is_over_or_a_workers(
    run: Run, squeue: Callable[[str], None]
) -> None:
    squeue("echo nobody home >&2; exit 1")
    run.update_status(launcher="slurm", job="7", state="running")
    with pytest.raises(EchelonError, match=r"Slurm does not say whether .*: nobody home"):
        claim_run_folder(run)
    run.update_status(in_sweep=True)
    assert find_writer(run) is None
    run.update_status(in_sweep=False)
    run.exit_code_file.write_text("0\n")
    claim_run_folder(run)


@pytest.mark.slow
def test_a_job_that_is_queued_again_takes_its_run_back_from_a_lost_node(
    run: Run, squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock may stay for a minute, until the file server has given the node up."""
    squeue("echo '7|RUNNING|None'")
    with holder(run):
        write_record(run, job="7", attempts={"slurm 7": 0})
        require_refusal(run, "running already, as process 1 on elsewhere")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        require_refusal(run, "running already, as process 1 on elsewhere")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        claim_run_folder(run)


def test_two_worlds_of_torchrun_without_an_id_are_not_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with holder(run) as process:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        require_refusal(run, f"running already, as process {process.pid}")


# --- cancel ---


def test_cancel_ends_what_writes_although_the_status_does_not_know_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ('{"state": "failed"}', "{"):
        run.status_file.write_text(text)
        with holder(run) as process:
            assert cancel_runs([run], now=False) == 0
            assert process.wait() == -signal.SIGTERM
            said = capsys.readouterr().out
            assert said == f"run a: process {process.pid} was asked to save and end\n"
        assert cancel_runs([run], now=False) == 0
        assert "run a was not running" in capsys.readouterr().out
