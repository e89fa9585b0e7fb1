"""How a command is run on another host.

Its words are one ssh command, which everybody may see. Its variables, some of which are secrets, go
to its standard input.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from echelon.config.schema import LaunchConfig
from echelon.errors import EchelonError, Fault
from echelon.hosts.ssh import build_ssh_prefix, split_ssh_command

_REMOTE_START = (
    'read -r env && eval "$env" && { cd "$1" 2>/dev/null || cd "$2"; } && shift 2 && exec "$@"'
)
"""Variables first, so that Python itself starts with its library paths; sh reads no byte further
than its line. `sh` whatever the login shell is."""

_CARRIED_VARIABLES = re.compile(
    r"PATH|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|"
    r"(CONDA|TORCH|NCCL|GLOO|CUDA|OMP|MKL|WANDB|HF|ECHELON)_\w+"
)
_MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES",)


def make_argv(
    launch: LaunchConfig, host: str, folders: tuple[str, str], words: Sequence[str]
) -> list[str]:
    """Return the ssh command that runs words on a host, in the first of two folders that exists
    there."""
    remote_command = shlex.join(["exec", "sh", "-c", _REMOTE_START, "sh", *folders, *words])
    ssh_command = split_ssh_command(launch.ssh, "launch.ssh")
    return [*build_ssh_prefix(ssh_command, host), remote_command]


# --- variables ---


def select_variables(env: Mapping[str, str], extra_names: Sequence[str]) -> dict[str, str]:
    """Return the variables that go along to the hosts, and those of `extra_names` that are set.

    Raises an EchelonError for names and values that cannot be sent.
    """
    chosen = {
        name: value
        for name, value in env.items()
        if name in extra_names
        or (_CARRIED_VARIABLES.fullmatch(name) and name not in _MACHINE_VARIABLES)
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
        Fault(f"launch.carry: {name!r} is not the name of a variable", "use letters, digits and _")
        for name in extra_names
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    ]
    if faults:
        raise EchelonError(*faults)
    return chosen


def encode_variables(variables: Mapping[str, str]) -> bytes:
    """Return the line that the remote shell reads before anything else; it sets the variables."""
    words = (f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    return os.fsencode(" ".join(["export", *words]) + "\n")
