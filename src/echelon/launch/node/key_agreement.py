"""How the nodes of a start come to the same key, where no launcher has given it to them.

With `launch=env` the same command is typed on every node. If ECHELON_KEY is not set there, node 0
makes a key and writes it into a file that only this user can read, in the folder that holds the
runs. The name of the file is random and stands in the store, so a file that an earlier start has
left is never taken. Where a node does not see the file it ends: a key that everybody can read would
let a stranger join the run and say where its files are written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.node.message_channel import connect_channel
from echelon.launch.plan import NodeSpec
from echelon.runs.process_record import identify_this_process, is_alive
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import find_trust_problem, make_trusted_folder
from echelon.world.network_key import KEY_VARIABLE, SUGGESTED_COMMAND, make_key, read_key
from echelon.world.sealed_store import SealedStore

LIFELINE_KEY = "lifeline"
"""Under which the store has the port of the lifeline, unsealed: the connection proves itself."""
_START_KEY = "start"
"""Under which the store has the random part of the file's name, or nothing if ECHELON_KEY is set.
It is no secret."""
_FILE_PREFIX = ".key-"
_START = re.compile(r"[0-9a-f]{32}")
_MAX_FILE_BYTES = 4096
_FILE_LIMIT_S = 10.0
"""How long a node looks for the file, which a network file system may show late."""
_KNOCK_LIMIT_S = 5.0
_POLL_S = 0.1
_SET_VARIABLE = f"set {KEY_VARIABLE} to the same value on every node, new for every start"


class AgreedKey(NamedTuple):
    """The key of a start."""

    key: str
    file: Path | None = None
    """Where node 0 has written it; to be removed when the run ends."""

    def remove_file(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)


def agree_on_key(
    unsealed: SealedStore, node: NodeSpec, env: Mapping[str, str], runs_folder: Path
) -> AgreedKey:
    """Return the key of the job: the one that the environment has, else the one of node 0's file.

    `unsealed` is the store, in which nothing is sealed yet.
    Raises an EchelonError on a node that has neither; node 0 then says that it has refused it.
    """
    key, is_alone = read_key(env), node.node_count + node.spares == 1
    if node.rank == 0:
        if key or is_alone:
            unsealed.set(_START_KEY, "")
            return AgreedKey(key or make_key())
        made, start = _write_key_file(runs_folder)
        unsealed.set(_START_KEY, start)
        return made
    if key:
        return AgreedKey(key)
    try:
        return _find_key_file(unsealed, node, runs_folder)
    except EchelonError:
        _let_node_0_refuse(unsealed, node)
        raise


def read_lifeline_port(store: SealedStore, node: NodeSpec) -> int:
    """Return the port of node 0's lifeline, which the store has. Anybody may have written it: the
    connection shows who is there."""
    text = _read_unsealed(store, node, LIFELINE_KEY)
    if text.isdecimal() and 0 < int(text) < 1 << 16:
        return int(text)
    raise EchelonError(
        Fault(
            f"somebody has written into the store of node 0 at {node.master_host}:"
            f"{node.master_port} who is not of this job",
            "start again, and see docs/security.md",
        ),
        exit=ExitCode.RENDEZVOUS,
    )


def _read_unsealed(store: SealedStore, node: NodeSpec, name: str) -> str:
    """Return a short text that node 0 puts into the store and that anybody can replace."""
    try:
        return store.with_key(None).get(name)[:100].decode(errors="replace")
    except RuntimeError:  # torch's, of which none has a sentence for a user
        raise EchelonError(
            Fault(
                f"node 0 at {node.master_host}:{node.master_port} has gone again, or is not a node "
                "of this job",
                "look at the end of its output",
            ),
            exit=ExitCode.RENDEZVOUS,
        ) from None


def _find_key_file(unsealed: SealedStore, node: NodeSpec, runs_folder: Path) -> AgreedKey:
    """Return the key that node 0 has written."""
    start = _read_unsealed(unsealed, node, _START_KEY)
    host = f"{socket.gethostname()} (node {node.rank})"
    if not _START.fullmatch(start):
        raise EchelonError(
            Fault(
                f"{KEY_VARIABLE} is set on node 0, but not on {host}",
                "set it to the same value on every node, or on none",
            ),
            exit=ExitCode.RENDEZVOUS,
        )
    file = runs_folder / f"{_FILE_PREFIX}{start}"
    deadline = time.monotonic() + _FILE_LIMIT_S
    while (found := read_key_file(file)) is None:
        if time.monotonic() > deadline:
            raise EchelonError(
                Fault(
                    f"{host} finds no file with the job's key in {runs_folder}, where node 0 has "
                    "written it",
                    f"{_SET_VARIABLE} (export {SUGGESTED_COMMAND}), or give a folder that all "
                    "nodes share with run.dir=PATH",
                ),
                exit=ExitCode.RENDEZVOUS,
            )
        time.sleep(_POLL_S)
    return AgreedKey(found, file)


def _let_node_0_refuse(unsealed: SealedStore, node: NodeSpec) -> None:
    """Connect to node 0 with a key that is not the job's, so that it prints that this node has been
    refused. Nobody who has no key can tell it more."""
    with contextlib.suppress(EchelonError):
        port = read_lifeline_port(unsealed, node)
        connect_channel(node.master_host, port, secrets.token_bytes(32), _KNOCK_LIMIT_S).close()


# --- the file ---


def _write_key_file(runs_folder: Path) -> tuple[AgreedKey, str]:
    """Write a new key into a file that nobody else can read, and return the random part of its
    name as well."""
    start, key = secrets.token_hex(16), make_key()
    file = runs_folder / f"{_FILE_PREFIX}{start}"
    content = json.dumps({"key": key, "process": identify_this_process()})
    try:
        make_trusted_folder(runs_folder)
        _remove_left_files(runs_folder)
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "w", encoding="utf-8") as opened:
            is_private = not os.fstat(number).st_mode & 0o077
            opened.write(content if is_private else "")
    except OSError as error:
        raise _make_file_error(runs_folder, format_os_error_reason(error)) from None
    if not is_private:
        file.unlink(missing_ok=True)
        raise _make_file_error(
            runs_folder, "files there can be read by others, whatever their mode"
        )
    return AgreedKey(key, file), start


def _make_file_error(runs_folder: Path, reason: str) -> EchelonError:
    return EchelonError(
        Fault(
            f"the key of this job cannot be written into a file in {runs_folder} ({reason})",
            f"{_SET_VARIABLE}: export {SUGGESTED_COMMAND}",
        )
    )


def read_key_file(file: Path) -> str | None:
    """Return the key that a file has; None if it is not there or not complete yet. Raises an
    EchelonError if somebody else could have written or read it."""
    content = _read_private_file(file)
    key = content.get("key") if content else None
    return str(key) if key else None


def _read_private_file(file: Path) -> dict[str, Any] | None:
    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        fault = Fault(f"{file}: {format_os_error_reason(error)}", f"{_SET_VARIABLE}")
        raise EchelonError(fault, exit=ExitCode.RENDEZVOUS) from None
    with open(number, "rb") as opened:
        status = os.fstat(number)
        if problem := find_trust_problem(file, status):
            raise EchelonError(
                Fault(problem.what, f"{_SET_VARIABLE}, or {problem.do}"), exit=ExitCode.RENDEZVOUS
            )
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise EchelonError(
                Fault(
                    f"{file} is to hold the job's key, but others may read it (mode "
                    f"{stat.S_IMODE(status.st_mode):04o})",
                    _SET_VARIABLE,
                ),
                exit=ExitCode.RENDEZVOUS,
            )
        try:
            content = json.loads(opened.read(_MAX_FILE_BYTES))
        except ValueError:
            return None
    return content if isinstance(content, dict) else None


def _remove_left_files(runs_folder: Path) -> None:
    """Remove the files of starts on this machine whose node 0 was killed."""
    for file in runs_folder.glob(f"{_FILE_PREFIX}*"):
        with contextlib.suppress(EchelonError, OSError):
            content = _read_private_file(file)
            if content and is_alive(content.get("process")) is False:
                file.unlink()
