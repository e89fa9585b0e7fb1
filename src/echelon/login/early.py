"""The connection to a login node that is begun before the configuration is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from echelon.config.defaults_files import FileDefaults
from echelon.config.validate import is_safe_host
from echelon.login.connection import connect_early

_KEYS = ("launch", "launch.login", "launch.ssh", "launch.python")


class ProbableLogin(NamedTuple):
    """The login node that a command names, as far as its words say so."""

    host: str
    ssh: str
    python: str | None


def find_probable_login(words: Sequence[str], defaults: FileDefaults) -> ProbableLogin | None:
    """Return the login node by which a command will submit; None if it will not, or in words that
    only Hydra understands."""
    found = {key: str(default.value) for key, default in defaults.launch.items()}
    for word in words:
        key, _, value = word.partition("=")
        if key in _KEYS:
            found[key] = value.strip("'\"")
    host, python = found.get("launch.login", "null"), found.get("launch.python", "null")
    if found.get("launch") != "slurm" or host == "null" or not is_safe_host(host):
        return None
    return ProbableLogin(host, found.get("launch.ssh", "ssh"), None if python == "null" else python)


def begin_connection(words: Sequence[str], defaults: FileDefaults) -> None:
    """Begin the connection that a command will need, while its configuration is composed."""
    if (login := find_probable_login(words, defaults)) is not None:
        connect_early(*login)
