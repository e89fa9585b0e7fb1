"""The command line that runs a command on another host over the system's ssh.

Keys, jump hosts and the check of host keys are the user's own, as their ssh has them configured.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

from echelon.errors import EchelonError, Fault

SSH_FAILED = 255
"""The exit code of ssh itself, as opposed to that of the command it ran."""

_OPTIONS = (
    "-T",  # no terminal: lines come unchanged
    *("-o", "ConnectTimeout=10"),
    # A host that is cut off is noticed within 15 s, though nobody closed the connection.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    # A connection that others share would outlive this command and keep its pipes open.
    *("-o", "ControlMaster=no"),
)
_NO_QUESTIONS = ("-o", "BatchMode=yes")
"""A question for a password or a host key would wait for ever where nobody sees it."""


def build_ssh_prefix(
    ssh_command: Sequence[str], host: str, *, asks_questions: bool = False
) -> list[str]:
    """Return the arguments before the command for the host's shell, which ssh takes as one text.

    ``asks_questions`` is for a person at the terminal: ssh may ask for a password, and whether an
    unknown host's key is right. Everywhere else such a login fails at once.
    """
    questions = () if asks_questions else _NO_QUESTIONS
    return [*ssh_command, *questions, *_OPTIONS, "--", host]


def split_ssh_command(command: str, setting: str) -> list[str]:
    """Return the words of a command such as ``ssh -F FILE``; a fault names the setting it is of."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise _make_invalid_command_error(command, setting, str(error).lower()) from None
    if not words:
        raise _make_invalid_command_error(command, setting, "it is empty")
    return words


def require_ssh(command: str, setting: str) -> None:
    """Raise a fault unless the program of an ssh command is on this machine."""
    program = split_ssh_command(command, setting)[0]
    if shutil.which(program) is None:
        raise _make_invalid_command_error(
            command, setting, f"there is no {program} on this machine"
        )


def explain_host_key_failure(
    ssh_command: str, host: str, stderr: str, other_way: str
) -> Fault | None:
    """Return the fault of a login that failed over the host's key, or None for another failure.

    A host that was never seen and a host whose key has changed are different: the first is every
    new machine, the second may be an attack. ssh prints a warning for a changed key only.
    `other_way` is what a person may do instead of a first login by hand.
    """
    text = stderr.lower()
    if "identification has changed" in text:
        return Fault(
            f"{host} shows another host key than the one that ssh has in known_hosts: it is "
            "another machine, was installed anew, or somebody is in between",
            "ask whoever runs it; if the new key is right, remove the old one with "
            f"`ssh-keygen -R {host}` and log in once with `{ssh_command} {host}`. Echelon never "
            "accepts a key by itself",
        )
    if "revoked" in text:
        return Fault(
            f"the host key of {host} is revoked in your ssh configuration",
            "ask whoever runs it for its new key. Echelon never accepts a key by itself",
        )
    if "host key" not in text:
        return None
    return Fault(
        f"ssh has never seen {host}: its host key is in no known_hosts, so ssh would ask whether "
        "it is right",
        f"log in once with `{ssh_command} {host}` and compare the fingerprint that it shows, or "
        f"{other_way}. Echelon never accepts a key by itself",
    )


def _make_invalid_command_error(command: str, setting: str, reason: str) -> EchelonError:
    separator = " " if setting.startswith("-") else "="
    hint = (
        f"give the command that logs in, e.g. {setting}{separator}'ssh -F FILE', or install OpenSSH"
    )
    return EchelonError(Fault(f"{setting}{separator}{command!r} is not a command: {reason}", hint))
