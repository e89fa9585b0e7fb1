"""The table and the lines of `echelon gpus`, compared with stored text."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path

import pytest
from fake_nvml import GIB, NOBODY_HERE, FakeDriver, MakeDriver, gpu, mig_slice, process

from echelon.gpus.formatting import render_plain_lines
from echelon.gpus.probe import Gpu, GpuNode, GpuProcess, MigSlice
from echelon.gpus.terminal import paint_line, render_gpu_table


def _process(
    user: str, pid: int, gib: float, age_s: float, command: str, **more: object
) -> GpuProcess:
    return GpuProcess(pid, user, int(gib * GIB), age_s, command, **more)  # type: ignore[arg-type]


def _gpu(index: int, use: int, gib: float, temperature: int, power: float, **more: object) -> Gpu:
    facts = (f"GPU-{index}", "NVIDIA H200", None, use, int(gib * GIB), 140 * GIB, temperature)
    return Gpu(index, *facts, power, 700.0, **more)  # type: ignore[arg-type]


TRAINING = "python train.py launch=local lr=0.1 trainer.epochs=90"
OURS = "python -m echelon train launch=slurm hidden=4096"
RUN = {"job": "4211", "run": "toy-20261115-101500-ab12", "run_folder": "/r"}
LEFT = {"run": "old", "run_folder": "/old", "orphan": True}
NODE = GpuNode(
    "node7",
    None,
    "550.54.15",
    "12.4",
    (
        _gpu(0, 97, 61, 64, 612, processes=(_process("kevin", 90711, 60.2, 11100, TRAINING),)),
        _gpu(1, 100, 131, 86, 698, processes=(_process("maria", 804, 130.4, 420, OURS, **RUN),)),
        _gpu(2, 0, 0.004, 34, 76, idle=True),
        Gpu(3, None, "NVIDIA H200", "lost: reboot or reset"),
        Gpu(4, "GPU-4", "NVIDIA H200", has_process_list=False),
        _gpu(
            5,
            0,
            12,
            35,
            80,
            processes=(
                _process("maria", 77, 0.48, 200_000, "python -m echelon train", **LEFT),
                GpuProcess(None, memory_bytes=int(11.2 * GIB)),
            ),
        ),
        Gpu(
            6,
            "GPU-6",
            "NVIDIA H200",
            memory_used_bytes=20 * GIB,
            memory_total_bytes=140 * GIB,
            mig=True,
            slices=(
                MigSlice(
                    0,
                    "MIG-0",
                    "NVIDIA H200 MIG 3g.71gb",
                    20 * GIB,
                    70 * GIB,
                    (_process("kevin", 5, 19, 59, "jupyter"),),
                    False,
                ),
                MigSlice(1, "MIG-1", "NVIDIA H200 MIG 4g.71gb", 12 << 20, 70 * GIB, (), True),
            ),
        ),
    ),
)

SCREENS = Path(__file__).with_name("screens")


def render(nodes: list[GpuNode], width: int, clock: str = "") -> str:
    return (
        "\n".join(
            paint_line(line, use_colour=False)
            for line in render_gpu_table(nodes, width, clock=clock)
        )
        + "\n"
    )


@pytest.mark.parametrize("width", [140, 80, 40])
def test_a_terminal_of_this_width(width: int) -> None:
    assert render([NODE], width) == (SCREENS / f"{width}.txt").read_text()


@pytest.mark.parametrize("width", range(20, 200, 3))
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    other = GpuNode("a-host-with-a-long-name", "cannot be reached: ssh: connect to host port 22")
    stale = GpuNode("n2", "no answer", "550.1", "12.4", NODE.gpus, stale_s=17.0)
    for clock in ("", "12:34:56"):
        lines = render([NODE, other, stale], width, clock).splitlines()
        assert max(map(len, lines)) <= width


def test_a_pipe() -> None:
    assert "\n".join(render_plain_lines([NODE])) + "\n" == (SCREENS / "pipe.txt").read_text()


def test_several_machines_are_named_in_every_line_of_a_pipe() -> None:
    other = GpuNode("n2", "cannot be reached: no route to host")
    stale = GpuNode("n3", "no answer", gpus=(_gpu(0, 5, 1, 30, 70),), stale_s=17.2)
    first, *_, unreachable, silent, seen = render_plain_lines([NODE, other, stale])
    assert first.startswith("node7  GPU 0  NVIDIA H200  use 97%")
    assert unreachable == "n2  cannot be reached: no route to host"
    assert silent == "n3  no answer  (seen 17 s ago)"
    assert seen.startswith("n3  GPU 0  NVIDIA H200")
    assert seen.endswith("(seen 17 s ago)")


def test_what_does_not_fit_is_seen_to_be_cut() -> None:
    lines = render([NODE], 20).splitlines()
    assert "  0   97%   61.0/14…" in lines
    assert all(len(line) < 20 or line.endswith("…") for line in lines)


def test_a_machine_that_is_silent_says_since_when() -> None:
    stale = GpuNode("n3", "no answer", "550.1", "12.4", NODE.gpus[:1], stale_s=17.2)
    assert "n3 · 1 GPU, 0 idle" in render([stale], 100)
    assert "seen 17 s ago: no answer" in render([stale], 100)


def test_own_processes_orphans_and_faults_stand_out() -> None:
    styles = {
        text: style
        for line in render_gpu_table([NODE], 140, highlighted_user="kevin")
        for text, style in line
    }
    assert [style for text, style in styles.items() if "kevin" in text] == ["bold", "bold"]
    assert [style for text, style in styles.items() if "orphan" in text] == ["red"]
    assert [style for text, style in styles.items() if "lost" in text] == ["bold red"]
    assert styles["  86°C"] == "red"


# --- the command at a real terminal ---


@contextmanager
def terminal(
    driver: FakeDriver, *words: str, columns: int = 80, **variables: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = driver.environment(TERM="xterm-256color", LC_ALL="C.UTF-8") | variables
    env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", "gpus", *words], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def at_terminal(driver: FakeDriver, *words: str, columns: int = 80, **variables: str) -> str:
    text = b""
    with terminal(driver, *words, columns=columns, **variables) as (ours, _), suppress(OSError):
        while piece := os.read(ours, 65536):
            text += piece
    return text.decode().replace("\r\n", "\n")


def test_watching_draws_over_what_changed_and_leaves_the_terminal_as_it_was(
    make_driver: MakeDriver,
) -> None:
    driver = make_driver(gpu(0, use=11), gpu(1, use=12))
    shown = b""
    with terminal(driver, "--watch", "0.1", NO_COLOR="1") as (ours, process):

        def until(wanted: bytes) -> bytes:
            nonlocal shown
            while wanted not in shown:
                shown += os.read(ours, 65536)
            before, _, shown = shown.partition(wanted)
            return before + wanted

        first = until(b"12%")
        assert re.search(rb" \d\d:\d\d:\d\d\x1b\[2;", first), "a full line's last letter stays"
        assert first.startswith(b"\x1b[?1049h\x1b[?25l"), "a page of its own"
        driver.set(gpu(0, use=11), gpu(1, use=13))
        later = until(b"13%")
        assert b"\x1b[4;1H" in later
        assert b"11%" not in later[later.index(b"\x1b[4;1H") :], "what stays is not sent again"
        process.send_signal(signal.SIGTSTP)
        until(b"\x1b[?25h\x1b[?1049l")
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), "as Ctrl-Z does"
        process.send_signal(signal.SIGCONT)
        assert b"\x1b[?1049h\x1b[?25l" in until(b"13%"), "all of it again"
        process.send_signal(signal.SIGINT)
        until(b"\x1b[?25h\x1b[?1049l")
        assert process.wait(timeout=300) == 0


@pytest.fixture
def machine(make_driver: MakeDriver) -> FakeDriver:
    return make_driver(
        gpu(0, use=97, used=61 * GIB, temp=64, power=612_000),
        gpu(1, mig=1),
        gpu(2, code=15),
        mig_slice(1, 0),
        process(NOBODY_HERE, gib=60),
    )


def test_no_colour_and_dumb_terminals(machine: FakeDriver) -> None:
    assert "\x1b[32m━" in at_terminal(machine)
    assert "\x1b[" not in at_terminal(machine, NO_COLOR="1")
    assert "\x1b[" not in at_terminal(machine, TERM="dumb")


def test_ascii_where_the_locale_has_nothing_else(machine: FakeDriver) -> None:
    terminal = at_terminal(machine, LC_ALL="C", NO_COLOR="1")
    assert terminal.isascii()
    assert "######" in terminal
    env = machine.environment(LC_ALL="C")
    piped = subprocess.run(
        [sys.executable, "-m", "echelon", "gpus"], env=env, capture_output=True, text=True
    ).stdout
    assert piped.isascii()
    assert "use 97%" in piped


def test_a_terminal_is_as_wide_as_it_is(machine: FakeDriver) -> None:
    text = at_terminal(machine, columns=40, NO_COLOR="1")
    assert max(map(len, text.splitlines())) <= 40
    assert re.search(r"  0 +97% +61.0/140 GiB  64°C  612/700 W\n +\? +\? +60.0 GiB", text)
