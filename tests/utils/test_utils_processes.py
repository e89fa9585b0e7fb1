"""Dying with the parent, and what /proc tells about a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from echelon.utils.processes import read_stat_fields

PARENT = """
import os, signal, subprocess, sys
from functools import partial
from echelon.utils.processes import die_with_parent
number = signal.Signals[sys.argv[1]]
child = subprocess.Popen(
    ["sleep", "600"], preexec_fn=partial(die_with_parent, os.getpid(), number)
)
print(child.pid, flush=True)
signal.pause()
"""
ORPHAN = """
from echelon.utils.processes import die_with_parent
die_with_parent(1 << 30)
print("still here")
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_child_ends_with_its_killed_parent(name: str) -> None:
    command = [sys.executable, "-c", PARENT, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert read_stat_fields(child)
        parent.kill()
    deadline = time.monotonic() + 300
    while (fields := read_stat_fields(child)) and fields[0] != "Z":
        assert time.monotonic() < deadline, fields
        time.sleep(0.02)


def test_a_child_that_is_too_late_to_ask_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_fields_begin_with_the_state_whatever_the_program_is_called() -> None:
    program = "import sys; open('/proc/self/comm', 'w').write('a) R (b'); print(1, flush=True)"
    command = [sys.executable, "-c", f"{program}; sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 300
        while (fields := read_stat_fields(process.pid)) and fields[0] != "T":
            assert time.monotonic() < deadline, fields
            time.sleep(0.02)
        assert fields
        assert int(fields[1]) == os.getpid()
        process.kill()
    assert read_stat_fields(process.pid) is None
