"""A command of Echelon's own on the login node that needs the Python of the jobs.

It may wait in Slurm's queue, and computes next to nothing. It ends with the connection.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from echelon.login.frames import ConnectionLostError

_END_S = 10.0
"""How long it has to give back what it asked Slurm for."""


def run_job_command(
    requests: BinaryIO,
    setup: Sequence[str],
    python: str,
    words: Sequence[str],
    folder: Path,
    print_line: Callable[[str], None],
) -> tuple[int, bytes]:
    """Run `echelon WORDS` after the lines of a job's setup; returns its exit code and its standard
    output. What it says on standard error is given to `print_line`, as it comes."""
    command = shlex.join([python, "-m", "echelon", *words])
    process = subprocess.Popen(
        ["bash", "-c", "\n".join([*setup, f"exec {command}"])],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out = _read_streams(requests, process, print_line)
        return process.wait(), out
    finally:
        _end(process)


def _read_streams(
    requests: BinaryIO, process: subprocess.Popen[bytes], print_line: Callable[[str], None]
) -> bytes:
    """Read until both streams are closed, or the laptop is gone."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, said = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (requests, process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        while len(selector.get_map()) > 1:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    raise ConnectionLostError
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    out += chunk
                else:
                    said += chunk
                    *lines, rest = said.split(b"\n")
                    said = bytearray(rest)
                    for line in lines:
                        print_line(line.decode(errors="replace"))
    if said:
        print_line(said.decode(errors="replace"))
    return bytes(out)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it as Ctrl-C would, so that what it has asked for is given back."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_END_S)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
