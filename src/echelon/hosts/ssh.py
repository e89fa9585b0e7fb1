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


def _make_invalid_command_error(command: str, setting: str, reason: str) -> EchelonError:
    separator = " " if setting.startswith("-") else "="
    hint = (
        f"give the command that logs in, e.g. {setting}{separator}'ssh -F FILE', or install OpenSSH"
    )
    return EchelonError(Fault(f"{setting}{separator}{command!r} is not a command: {reason}", hint))
