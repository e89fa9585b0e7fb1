"""`echelon dev` on the test cluster: a shell in an allocation, and every way in which one ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from command_runner import CommandResult, until
from typed_terminal import TypedTerminal, open_terminal

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
LIMIT_S = 240.0
SLURM = ("launch=slurm", "launch.nodes=2", "launch.gpus_per_node=2", "launch.time=10")


@pytest.fixture
def dev(command_line: CommandLine) -> Iterator[CommandLine]:
    """A place to type at, whose allocations are its own: their folder is, and they end with it."""
    command_line.variables["ECHELON_CACHE"] = str(command_line.folder / "cache")
    yield command_line
    jobs = command_line.cluster.slurm("squeue", "-h", "-n", "echelon-dev", "-o", "%A").split()
    if jobs:
        command_line.cluster.slurm("scancel", *jobs)
        command_line.cluster.wait_until_empty()


@contextmanager
def _terminal(dev: CommandLine, *words: str) -> Iterator[TypedTerminal]:
    command = [sys.executable, "-m", "echelon", "dev", *words]
    conf = {"SLURM_CONF": str(dev.cluster.slurm_conf)}
    with open_terminal(command, dev.folder, **dev.variables, **conf) as terminal:
        yield terminal


def _state(dev: CommandLine) -> dict[str, Any]:
    return dict(json.loads((dev.folder / "cache" / "dev" / "dev" / "state.json").read_text()))


def _list(dev: CommandLine) -> list[dict[str, Any]]:
    done = dev.type("dev", "--list", "--json")
    assert done.code == ExitCode.OK, done.err
    return list(json.loads(done.out)["allocations"])


def _ask(terminal: TypedTerminal, command: str) -> str:
    """The answer to a command in the shell, between marks that its echo does not show."""
    terminal.type_line(f"echo beg''in; {command}; echo e''nd")
    terminal.wait_for("begin\r\n", LIMIT_S)
    return terminal.wait_for("end", LIMIT_S).removesuffix("end").strip()


def test_a_shell_sees_the_whole_job_and_is_come_back_to(dev: CommandLine) -> None:
    with _terminal(dev, *SLURM, "--idle", "20") as first:
        first.wait_for("at most 0.67 GPU-hours: 2 nodes × 2 GPUs × 10", LIMIT_S)
        first.wait_for("ends after 20 min without use", LIMIT_S)
        job = re.search(r"job (\d+)", first.wait_for(": echelon-dev", LIMIT_S))
        assert job is not None
        number = job[1]
        # As in salloc: the job's size, and no task that a training would take itself for.
        facts = (
            "echo $SLURM_JOB_ID $SLURM_NNODES [$SLURM_PROCID$SLURM_STEP_ID] $CUDA_VISIBLE_DEVICES"
        )
        assert _ask(first, facts) == f"{number} 2 [] 0,1"
        assert _ask(first, "srun hostname | sort").split() == dev.hosts(number)
        explain = f"{sys.executable} -m echelon explain | head -n 1"
        assert _ask(first, explain) == "one process: nothing that is set makes a world"

        # Another terminal comes back to the same job, also when the controller is slow.
        with _slow_controller(dev), _terminal(dev) as second:
            second.wait_for(f"job {number} is there already", LIMIT_S)
            assert _ask(second, "echo $SLURM_JOB_ID") == number
            first.process.kill()  # a lost terminal loses nothing
            assert _ask(second, "hostname") == dev.hosts(number)[0]
            folder = dev.folder / "cache" / "dev" / "dev"
            watched = {f"activity-{host}" for host in dev.hosts(number)}  # on all nodes
            until(
                lambda: watched == {f.name for f in folder.glob("activity-*")}, LIMIT_S, "watched"
            )
            [listed] = _list(dev)
            assert (listed["job"], listed["state"], listed["node_count"]) == (number, "RUNNING", 2)
            assert listed["idle_s"] < 60
            ended = dev.type("dev", "--end")
            assert ended.out == f"job {number} ends: echelon-dev\n"
            assert second.wait(LIMIT_S) == ExitCode.OK
            assert "is over: echelon dev --end was typed" in second.shown
    assert _list(dev) == []
    again = dev.type("dev", "--end")
    assert (again.code, "there is no allocation 'dev'" in again.err) == (ExitCode.NOT_FOUND, True)
    without = dev.type("dev")
    assert without.code == ExitCode.USAGE
    assert "there is no allocation 'dev' to come back to" in without.err


@contextmanager
def _slow_controller(dev: CommandLine) -> Iterator[None]:
    """For some seconds nothing that is asked of the controller is answered."""
    found = subprocess.run(
        ["pgrep", "-f", f"slurmctld.*{dev.cluster.slurm_conf}"], capture_output=True, text=True
    )
    [pid] = [int(line) for line in found.stdout.split()]
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(4.0, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def _used(job: str) -> Iterator[None]:
    """Meanwhile a process of the job computes, so that it is not idle, however slow all else is."""
    words = [sys.executable, "-c", "while True: pass"]
    busy = subprocess.Popen(words, env={"SLURM_JOB_ID": job})
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def test_an_allocation_ends_when_it_is_idle(dev: CommandLine) -> None:
    words = ("launch=slurm", "launch.time=10", "--idle", "0.2")
    with _terminal(dev, *words) as terminal:
        job = re.search(r"job (\d+)", terminal.wait_for(": echelon-dev", LIMIT_S))
        assert job is not None
        with _used(job[1]):
            assert _ask(terminal, "echo $SLURM_JOB_ID") == job[1]
        terminal.wait_for("nobody uses this allocation; it ends in", LIMIT_S)
        assert terminal.wait(LIMIT_S) == ExitCode.OK
        assert "is over: nobody used it for 0.2 minutes" in terminal.shown
    dev.cluster.wait_for_job(job[1], "COMPLETED")


def test_the_time_limit_is_told_and_ends_it(dev: CommandLine) -> None:
    words = ("launch=slurm", "launch.time=10", "--detach")
    done: CommandResult = dev.type("dev", *words)
    assert done.code == ExitCode.OK, done.err
    number = _state(dev)["job"]
    with _terminal(dev) as terminal:
        assert _ask(terminal, "echo $SLURM_JOB_ID") == number
        # Slurm would send it before the end of the time.
        dev.cluster.slurm("scancel", "--batch", "--signal=USR2", number)
        terminal.wait_for("the time limit of this allocation is near", LIMIT_S)
        dev.cluster.slurm("scontrol", "update", f"jobid={number}", "timelimit=1")
        assert terminal.wait(LIMIT_S) == ExitCode.OK
        assert f"job {number} is over: its time was up" in terminal.shown
    dev.cluster.wait_for_job(number, "TIMEOUT")


def test_a_port_of_the_node_by_an_sshd_of_ones_own(dev: CommandLine, tmp_path: Path) -> None:
    """The nodes' own sshd is not known to this configuration of ssh, so one is started."""
    config = tmp_path / "ssh" / "config"
    config.parent.mkdir(mode=0o700)
    config.write_text("Host other\n    Port 22\n")
    words = ("launch=slurm", "launch.time=10", "--config", str(config), "--port", "8888")
    done = dev.type("dev", *words, "--json")
    assert done.code == ExitCode.OK, done.err
    opened = json.loads(done.out)
    assert opened["forward"] == ["ssh -N -L 8888:localhost:8888 echelon-dev"]
    assert opened["ssh"]["port"] > 1023
    assert config.read_text().startswith("Host other\n    Port 22\n\n")  # as it was
    assert config.read_text().count("Include") == 1
    login = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "echelon-dev"]
    asked = subprocess.run(
        [*login, "echo $SLURM_JOB_ID on $(hostname)"], capture_output=True, text=True, timeout=60
    )
    assert asked.stdout == f"{opened['job']} on {opened['node']}\n", asked.stderr
    assert dev.type("dev", *words, "--json").code == ExitCode.OK
    assert config.read_text().count("Include") == 1
    assert dev.type("dev", "--end").code == ExitCode.OK
    until(lambda: subprocess.run([*login, "true"], capture_output=True).returncode, 60, "ended")
