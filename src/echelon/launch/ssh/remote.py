"""How a command is said to another machine: one argv for all to see, and the variables, some of
which are secrets, on its standard input."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence

from echelon.config.schema import Launch
from echelon.errors import EchelonError, Fault

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # a connection that others share would outlive us
)
_START = 'read -r env && eval "$env" && { cd "$1" 2>/dev/null || cd "$2"; } && shift 2 && exec "$@"'
"""Variables first, so that Python itself starts with its library paths; sh reads no byte further
than its line. `sh` whatever the login shell is."""

_CARRIED = re.compile(
    r"PATH|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|"
    r"(CONDA|TORCH|NCCL|GLOO|CUDA|OMP|MKL|WANDB|HF|ECHELON)_\w+"
)
_OF_A_MACHINE = ("CUDA_VISIBLE_DEVICES",)


def argv(launch: Launch, host: str, folders: tuple[str, str], words: Sequence[str]) -> list[str]:
    """Run words on a host, in the first folder that is there."""
    said = shlex.join(["exec", "sh", "-c", _START, "sh", *folders, *words])
    return [*ssh_words(launch), *_OPTIONS, "--", host, said]


def ssh_words(launch: Launch) -> list[str]:
    try:
        words = shlex.split(launch.ssh)
    except ValueError as error:
        raise _no_command(launch, str(error).lower()) from None
    if not words:
        raise _no_command(launch, "it is empty")
    return words


def require_ssh(launch: Launch) -> None:
    program = ssh_words(launch)[0]
    if shutil.which(program) is None:
        raise _no_command(launch, f"there is no {program} on this machine")


def _no_command(launch: Launch, reason: str) -> EchelonError:
    hint = "give the command that logs in, e.g. launch.ssh='ssh -F my_config', or install OpenSSH"
    return EchelonError(Fault(f"launch.ssh={launch.ssh!r} is no command: {reason}", hint))


# --- variables ---


def carried(env: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """The variables that go along; of those wanted, the ones that are set."""
    chosen = {
        name: value
        for name, value in env.items()
        if name in wanted or (_CARRIED.fullmatch(name) and name not in _OF_A_MACHINE)
    }
    faults = [
        Fault(
            f"the variable {name} cannot be carried over: its value has several lines",
            "put it into a file that the program reads on every host",
        )
        for name, value in chosen.items()
        if "\n" in value
    ]
    faults += [
        Fault(f"launch.carry: {name!r} is no name of a variable", "use letters, digits and _")
        for name in wanted
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    ]
    if faults:
        raise EchelonError(*faults)
    return chosen


def first_line(variables: Mapping[str, str]) -> bytes:
    """What `_START` reads before anything else."""
    words = (f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    return os.fsencode(" ".join(["export", *words]) + "\n")


def last_words(text: str, lines: int = 2) -> str:
    """The end of what a command said, in one line, without the frames it may draw."""
    said = [line.strip() for line in text.splitlines() if line.strip(" @\t")]
    return " ".join(said[-lines:])
