"""A process that ends with another one, which is not its parent."""

from __future__ import annotations

import signal
import subprocess
import sys

from command_runner import until

_PROGRAM = """
import sys, time
from echelon.utils.processes import die_with_process
die_with_process(int(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
time.sleep(300)
"""


def start(pid: int, name: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _PROGRAM, str(pid), name]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_it_is_killed_when_the_other_one_ends() -> None:
    watched = subprocess.Popen(["sleep", "300"])
    processes = [start(watched.pid, "sleep"), start(watched.pid, "podman"), start(2**22, "sleep")]
    try:
        watched.kill()
        watched.wait()
        assert processes[0].wait(60) == -signal.SIGKILL
        # Not the process that was meant: nobody waits for it.
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def test_the_child_that_waits_ends_with_it() -> None:
    watched = subprocess.Popen(["sleep", "300"])
    process = start(watched.pid, "sleep")
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
            [child] = file.read().split()
        process.kill()
        process.wait()

        def has_ended() -> bool:
            try:
                with open(f"/proc/{child}/stat", encoding="utf-8") as file:
                    return file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                return True

        until(has_ended, 60, "the end of the child")
    finally:
        watched.kill()
        watched.wait()
        assert process.stdout is not None
        process.stdout.close()
