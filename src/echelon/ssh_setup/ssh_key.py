"""The key for the hosts: made when there is none, never changed when there is."""

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
    """Make an ed25519 key without a passphrase, because launch=ssh logs in without questions."""
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
        lines = (done.stderr or done.stdout).strip().splitlines() or ["ssh-keygen printed nothing"]
        raise EchelonError(
            Fault(f"no key could be made at {path}: {lines[-1]}", "give another place: --key FILE")
        )


def key_exists(path: Path) -> bool:
    """Return whether anything has that name, even a broken link: it belongs to somebody."""
    return os.path.lexists(path)


def read_public_key(path: Path) -> str:
    """Return the public key, from its file or computed from the private key."""
    public_file = Path(f"{path}.pub")
    if public_file.is_file():
        return public_file.read_text(encoding="utf-8").strip()
    done = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["ssh-keygen printed nothing"]
        raise EchelonError(
            Fault(
                f"{path} exists, but its public key cannot be read: {lines[-1]}",
                f"put it beside as {public_file.name}, or give another key with --key FILE",
            )
        )
    return done.stdout.strip()
