"""A host of ssh's configuration for the first node of an allocation: `ssh echelon-dev`.

The entry is in a file of the allocation's own folder. The user's configuration gets one line that
includes all such files, at its end, once; nothing else in it is touched.
"""

from __future__ import annotations

import getpass
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.interactive.allocation import AllocationFolder
from echelon.ssh_setup.ssh_config import append_to_config, find_home_folder

_LOGIN_S = 15.0
_OWN_SSHD_S = 40.0
_POLL_S = 0.2


class SshEntry(NamedTuple):
    """How the first node is reached by ssh."""

    alias: str
    node: str
    port: int | None
    """Of an sshd of the user's own; None for that of the node."""
    config: Path

    def make_forwarding_command(self, port: int) -> str:
        """Return the command that forwards a port of this machine to the node's own."""
        return f"ssh -N -L {port}:localhost:{port} {self.alias}"

    def make_distant_command(self, port: int) -> str:
        """Return the command that does so from another machine, by way of this one."""
        at = f"-p {self.port} " if self.port else ""
        login = f"{getpass.getuser()}@{socket.getfqdn()}"
        user = f"{getpass.getuser()}@{self.node}"
        return f"ssh -N -L {port}:localhost:{port} -J {login} {at}{user}"

    def to_dict(self) -> dict[str, object]:
        """Return it as plain values for JSON."""
        return self._asdict() | {"config": str(self.config)}


def open_ssh_entry(files: AllocationFolder, job: str, config: Path | None) -> SshEntry:
    """Write the entry of a running allocation and return it.

    The node's own sshd is used where it lets the user in without a question; else the keeper starts
    one. Raises an EchelonError if there is none.
    """
    state = files.read_state(job)
    if state is None:
        raise EchelonError(
            Fault(f"job {job} does not run yet, so there is no node to log in to", "wait for it"),
            exit=ExitCode.NOT_FOUND,
        )
    node = str(state["node"])
    used = config or find_home_folder() / ".ssh" / "config"
    port = None if _can_log_in(node, config) else _request_own_sshd(files, job)
    files.ssh_config_file.write_text(_render_entry(files, node, port), encoding="utf-8")
    files.ssh_config_file.chmod(0o600)
    _include_entries(files, used)
    return SshEntry(files.job_name, node, port, used)


def _can_log_in(node: str, config: Path | None) -> bool:
    """Return whether the node takes a login without a question."""
    file = ["-F", str(config)] if config else []
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    try:
        done = subprocess.run(
            ["ssh", *file, *options, "--", node, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOGIN_S,
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        raise EchelonError(
            Fault("there is no ssh on this machine's PATH", "install OpenSSH's client")
        ) from None
    return done.returncode == 0


def _request_own_sshd(files: AllocationFolder, job: str) -> int:
    """Ask the keeper for an sshd, and return its port."""
    files.ssh_request_file.touch()
    deadline = time.monotonic() + _OWN_SSHD_S
    why = "the keeper of the allocation does not answer"
    while time.monotonic() < deadline:
        answer = (files.read_state(job) or {}).get("ssh")
        if isinstance(answer, dict):
            if isinstance(port := answer.get("port"), int):
                return port
            why = str(answer.get("error"))
            break
        time.sleep(_POLL_S)
    raise EchelonError(
        Fault(
            f"nobody can log in to the node of job {job} by ssh, and no sshd of your own runs "
            f"there: {why}",
            "the shell of `echelon dev` works without; for ports ask whoever runs the cluster "
            "whether nodes of a job may be logged in to",
        ),
        exit=ExitCode.NOT_READY,
    )


def _render_entry(files: AllocationFolder, node: str, port: int | None) -> str:
    lines = [f"Host {files.job_name}", f"    HostName {node}"]
    if port is not None:
        folder = files.folder
        known = folder / "known_hosts"
        host_key = (folder / "host_key.pub").read_text(encoding="utf-8").strip()
        known.write_text(f"{files.job_name} {host_key}\n", encoding="utf-8")
        lines += [
            f"    Port {port}",
            f"    User {getpass.getuser()}",
            f'    IdentityFile "{folder}/id_ed25519"',
            "    IdentitiesOnly yes",
            f"    HostKeyAlias {files.job_name}",
            f'    UserKnownHostsFile "{known}"',
        ]
    return "\n".join(lines) + "\n"


def _include_entries(files: AllocationFolder, config: Path) -> None:
    """Add the line that includes the entries of all allocations, unless it is there."""
    line = f'Include "{files.folder.parent}/*/{files.ssh_config_file.name}"'
    try:
        before = config.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        before = ""
    except OSError as error:
        raise EchelonError(
            Fault(f"{config} cannot be read: {error.strerror}", "give another with --config FILE")
        ) from None
    if line in before:
        return
    # After the last `Host` block a line would belong to that block alone.
    append_to_config(config, f"# The allocations of echelon dev.\nMatch all\n{line}\n")
    print(f"added to {config}: {line}", file=sys.stderr, flush=True)


def make_ssh_command(entry: SshEntry, config: Path | None) -> str:
    """Return what to type to log in."""
    file = f"-F {shlex.quote(str(config))} " if config else ""
    return f"ssh {file}{entry.alias}"
