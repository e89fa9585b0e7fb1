"""When a job counts as used: by real processes that say they are of it, and a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_runner import until

from echelon.interactive.activity import ActivityMonitor
from echelon.interactive.allocation import AllocationFolder, select_job_variables

LIMIT_S = 60.0


@pytest.fixture
def job() -> str:
    """A number that no other job of this machine has."""
    return str(uuid.uuid4().int)[:12]


@contextmanager
def _process(job: str, code: str, files: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a job, once it has begun to do what its code says."""
    started, told = os.pipe()
    inner = dict(zip(("stdin", "stdout", "stderr"), files, strict=False))
    begun = f"import os; os.write({told}, b'1')\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", begun],
        env={"SLURM_JOB_ID": job},
        pass_fds=[told],
        start_new_session=True,
        **inner,  # type: ignore[call-overload]
    )
    os.close(told)
    try:
        assert os.read(started, 1) == b"1"
        yield process
    finally:
        os.close(started)
        process.kill()
        process.wait()


def test_a_process_that_computes_is_use_and_one_that_waits_is_none(job: str) -> None:
    monitor = ActivityMonitor(job)
    assert monitor.sample()  # a job that has just begun
    with _process(job, "import time; time.sleep(600)"):
        monitor.sample()
        until(lambda: not monitor.sample(), LIMIT_S, "idle")
        with _process(job, "while True: pass") as busy:
            until(monitor.sample, LIMIT_S, "use")
            busy.kill()
            busy.wait()
            until(lambda: not monitor.sample(), LIMIT_S, "idle again")
        with _process("1", "while True: pass"):  # of another job of the same user
            assert not monitor.sample()


def test_typing_is_use(job: str) -> None:
    """The kernel notes reads from a terminal to some seconds, so the first one may not show."""
    handle, inner = pty.openpty()
    controlling = "import fcntl, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code = f"{controlling}for line in sys.stdin: pass"
    with _process(job, code, [inner, inner]):
        os.close(inner)
        monitor = ActivityMonitor(job)
        monitor.sample()
        assert monitor.list_terminals() != set()
        until(lambda: not monitor.sample(), LIMIT_S, "idle")

        def is_use_seen() -> bool:
            os.write(handle, b"ls\n")
            return monitor.sample()

        until(is_use_seen, LIMIT_S, "use")
    os.close(handle)


def test_variables_of_the_job_are_told_from_those_of_a_step() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "HOME": "/"}
    assert select_job_variables(env | {"SLURM_PROCID": "0", "SLURM_TASK_PID": "9"}) == {
        key: value for key, value in env.items() if key != "HOME"
    }


def test_a_folder_is_its_owners_alone_and_forgets_the_job_before(tmp_path: Path) -> None:
    files = AllocationFolder.find("dev", {"ECHELON_CACHE": str(tmp_path)})
    files.prepare()
    assert files.folder.stat().st_mode & 0o777 == 0o700
    files.state_file.write_text('{"job": "7"}')
    files.ended_file.write_text("idle\n")
    assert files.read_state("7") == {"job": "7"}
    assert files.read_state("8") is None
    files.prepare()
    assert files.read_state("7") is None
    assert not files.ended_file.exists()
