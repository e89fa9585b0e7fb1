"""What ssh is told to run on a login node: a Python that is there, and a program that it is given.

The program is the text of `host_program.py`, which receives Echelon's own code if it is not there.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from echelon.login import host_program

NO_PYTHON = 113
"""The exit code of the script where no Python is new enough."""
_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10")
_READ_PROGRAM = "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"
_IS_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 10))"
_SCRIPT = (
    "{ command -v sbatch || { [ -r /etc/profile ] && . /etc/profile; }; } >/dev/null 2>&1; "
    'for p do case "$p" in "~/"*) p="$HOME/${p#??}" ;; esac; '
    f"""if command -v "$p" >/dev/null 2>&1 && "$p" -I -c '{_IS_NEW_ENOUGH}' 2>/dev/null; """
    f"""then exec "$p" -I -c '{_READ_PROGRAM}'; fi; done; """
    f'echo "$(python3 -V 2>&1 || echo no python3)" >&2; exit {NO_PYTHON}'
)
"""A shell that is not a login shell may not find Slurm before /etc/profile was read. It is one
line, as csh ends a quoted word at the end of its line."""


def make_remote_command(python: str | None) -> str:
    """Return the command for the login shell of the host, whatever shell that is."""
    pythons = [*([python] if python else []), *_PYTHONS]
    return shlex.join(["exec", "sh", "-c", _SCRIPT, "sh", *pythons])


def read_host_program() -> bytes:
    """Return what is written to that command first: the length of a program, and the program."""
    text = Path(host_program.__file__).read_bytes()
    return b"%d\n" % len(text) + text
