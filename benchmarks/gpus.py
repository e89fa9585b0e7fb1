"""One look at 8 GPUs with 100 processes, and what looking twice a second takes.

The GPUs are the tests' stand-in for NVML (tests/helpers/fake_nvml.py), which answers at once, so
that the programs
are compared and not the driver; the processes are real. gpustat (of the extra `bench`, or in the
PATH) is asked for the same columns: user, pid, command, power. Where there is an NVIDIA GPU,
nvidia-smi is timed beside it on the real driver.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from fcntl import ioctl
from functools import partial
from pathlib import Path

from common import (
    HERE,
    Figure,
    Result,
    compute_ratios,
    environment,
    find_tool,
    make_figure,
    measure_in_turns,
    run_benchmark,
)
from startup import shorten_command

sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
import fake_nvml

ROUNDS = 15
GPUS, PROCESSES = 8, 100
WATCHED_S = 20.0
OURS, JSON = "echelon gpus", "echelon gpus --json"
GPUSTAT, SMI = "gpustat", "nvidia-smi"
COLUMNS = ["--show-cmd", "--show-user", "--show-pid", "--show-power"]


def measure(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder, _machine(folder) as env:
        commands = {
            OURS: [find_tool("echelon"), "gpus"],
            JSON: [find_tool("echelon"), "gpus", "--json"],
        }
        if gpustat := shutil.which(
            "gpustat", path=f"{Path(find_tool('gpustat')).parent}:{env['PATH']}"
        ):
            commands[GPUSTAT] = [gpustat, *COLUMNS]
        seconds = measure_in_turns(
            {n: partial(_time_command, c, env) for n, c in commands.items()}, rounds
        )
        share = [100 * _share(env) for _ in range(3)]
    found = [
        make_figure(
            f"one look, {name}, × {GPUSTAT}", compute_ratios(seconds[name], seconds[GPUSTAT]), 0.5
        )
        for name in (OURS, JSON)
        if GPUSTAT in seconds
    ]
    found += _beside_smi(rounds)
    found.append(make_figure("echelon gpus --watch 0.5, of a core", share, 2, "%"))
    return {
        "config": {
            "gpus": GPUS,
            "processes": PROCESSES,
            "commands": {n: " ".join(map(shorten_command, c)) for n, c in commands.items()},
            "rounds": rounds,
        },
        "figures": found,
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
    }


@contextlib.contextmanager
def _machine(folder: str):  # type: ignore[no-untyped-def]
    """The variables of a program that sees it."""
    with contextlib.ExitStack() as stack:
        work = [
            stack.enter_context(fake_nvml.run_idle_process(f"python train.py {i}"))
            for i in range(PROCESSES)
        ]
        gpus = [fake_nvml.gpu(i, use=90 + i, used=60 * fake_nvml.GIB) for i in range(GPUS)]
        lines = [fake_nvml.process(pid, on=i % GPUS, gib=4.5) for i, pid in enumerate(work)]
        driver = fake_nvml.FakeDriver(Path(folder) / "driver", *gpus, *lines)
        yield environment(**driver.environment())


def _beside_smi(rounds: int) -> list[Figure]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    commands = {OURS: [sys.executable, "-m", "echelon", "gpus"], SMI: [smi]}
    env = environment()
    seconds = measure_in_turns(
        {n: partial(_time_command, c, env) for n, c in commands.items()}, rounds
    )
    return [
        make_figure(f"one look, {OURS}, × {SMI}", compute_ratios(seconds[OURS], seconds[SMI]), 0.5)
    ]


def _time_command(command: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - began


def _share(env: dict[str, str]) -> float:
    """Of a core, once it has started, at a terminal that shows all of it."""
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 120, 140, 0, 0))
    words = [find_tool("echelon"), "gpus", "--watch", "0.5"]
    program = subprocess.Popen(words, env=env | {"TERM": "xterm"}, stdout=theirs, close_fds=True)
    os.close(theirs)
    threading.Thread(target=_drain_output, args=(ours,), daemon=True).start()
    try:
        time.sleep(3)
        before, began = _cpu_s(program.pid), time.perf_counter()
        time.sleep(WATCHED_S)
        return (_cpu_s(program.pid) - before) / (time.perf_counter() - began)
    finally:
        program.kill()
        program.wait()


def _drain_output(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def _cpu_s(pid: int) -> float:
    """Finer than the ticks of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    run_benchmark("time one look at the GPUs", measure, ROUNDS)
