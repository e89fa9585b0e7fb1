"""An sshd of the user's own, on the first node of an allocation, for nodes that let nobody log in.

It listens on a free port, takes keys alone, and ends with the job. Its keys are made for the
allocation; whoever may log in as the user by ~/.ssh/authorized_keys may do so here too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from echelon.interactive.allocation import AllocationFolder, select_job_variables
from echelon.utils.os_errors import format_os_error_reason

_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"
_START_S = 10.0
_TRIES = 3
_SSHD_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PATH", "VIRTUAL_ENV")
"""Beside the variables of the job."""


class OwnSshd:
    """Starts it once the folder of the allocation asks for it."""

    def __init__(self, files: AllocationFolder, env: Mapping[str, str]) -> None:
        self._files, self._env = files, env
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._error = ""

    def describe(self) -> dict[str, object] | None:
        """Return the port, or why there is none; None before anybody has asked."""
        if self._error:
            return {"error": self._error}
        return None if self._port is None else {"port": self._port}

    def serve_request(self) -> bool:
        """Start it if that was asked for; returns whether anything has changed."""
        if self._port is not None or self._error or not self._files.ssh_request_file.exists():
            return False
        try:
            self._start()
        except OSError as error:
            self._error = format_os_error_reason(error)
        except subprocess.CalledProcessError as error:
            self._error = f"{error.cmd[0]} ended with {error.returncode}"
        return True

    def stop(self) -> None:
        """End it, and with it the logins that it has."""
        if self._process is not None:
            self._process.terminate()

    def _start(self) -> None:
        program = shutil.which("sshd", path=f"{self._env.get('PATH', '')}:{_SYSTEM_FOLDERS}")
        if program is None:
            self._error = "there is no sshd on the node"
            return
        self._make_keys()
        log = self._files.folder / "sshd.log"
        for _ in range(_TRIES):
            port = _find_free_port()
            config = self._files.folder / "sshd_config"
            config.write_text(self._render_config(port), encoding="utf-8")
            words = [program, "-D", "-f", str(config), "-E", str(log)]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
            if _is_listening(self._process, port):
                self._port = port
                return
        self._error = f"sshd does not start, see {log}"

    def _make_keys(self) -> None:
        """Make the key of the host and one to log in with; take the user's own ones too."""
        folder = self._files.folder
        for name in ("host_key", "id_ed25519"):
            if not (folder / name).exists():
                words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self._files.job_name]
                subprocess.run([*words, "-f", str(folder / name)], check=True)
        keys = [(folder / "id_ed25519.pub").read_text(encoding="utf-8")]
        with contextlib.suppress(OSError):
            own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "authorized_keys"
            keys.append(own.read_text(encoding="utf-8"))
        accepted = folder / "authorized_keys"
        accepted.write_text("\n".join(keys), encoding="utf-8")
        accepted.chmod(0o600)

    def _render_config(self, port: int) -> str:
        folder = self._files.folder
        passed = {name: self._env[name] for name in _SSHD_VARIABLES if self._env.get(name)}
        given = select_job_variables(self._env) | passed
        # A double quote would end the value; nothing of Slurm's has one.
        variables = " ".join(f'"{k}={v}"' for k, v in given.items() if '"' not in v)
        return "\n".join(
            [
                f"Port {port}",
                f'HostKey "{folder}/host_key"',
                f'AuthorizedKeysFile "{folder}/authorized_keys"',
                "StrictModes no",  # the folder is its owner's alone, whatever is above it
                f"AllowUsers {pwd.getpwuid(os.getuid()).pw_name}",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                "PidFile none",
                "Subsystem sftp internal-sftp",
                f"SetEnv {variables}",
                "",
            ]
        )


def _find_free_port() -> int:
    """Return a port that is free now. sshd takes a number alone, so another program may be first;
    then it ends, and the next one is tried."""
    with socket.socket() as reserved:
        reserved.bind(("", 0))
        return int(reserved.getsockname()[1])


def _is_listening(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until a server takes connections; False if it has ended, or is too slow."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        time.sleep(0.05)
    return False
