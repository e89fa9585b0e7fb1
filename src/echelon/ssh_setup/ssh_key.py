"""The key that opens the hosts: made when there is none, never touched when there is."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.ssh_setup.ssh_config import make_private_folder


def make_key(path: Path) -> None:
    """ed25519, without a passphrase: launch=ssh logs in without a question."""
    if shutil.which("ssh-keygen") is None:
        raise EchelonError(
            Fault("there is no ssh-keygen on this machine", "install OpenSSH's client")
        )
    make_private_folder(path.parent)
    comment = f"{getpass.getuser()}@{socket.gethostname()}"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise EchelonError(
            Fault(f"no key could be made at {path}: {said[-1]}", "give another place: --key FILE")
        )


def key_exists(path: Path) -> bool:
    """Anything at all by that name: it is somebody's."""
    return os.path.lexists(path)


def read_public_key(path: Path) -> str:
    """The half that may be shown; from its file, or worked out from the other half."""
    beside = Path(f"{path}.pub")
    if beside.is_file():
        return beside.read_text(encoding="utf-8").strip()
    done = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise EchelonError(
            Fault(
                f"{path} is there, but gives no public key: {said[-1]}",
                f"put it beside as {beside.name}, or give another key with --key FILE",
            )
        )
    return done.stdout.strip()
