"""Debian packages that only some tests need, installed by whoever is first to need them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

OPTIONS = ("-y", "-q", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300")
BUSY_S = 300.0
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def install_missing(package_of: Mapping[str, str], purpose: str) -> str:
    """Install the packages of programs that are missing, one process at a time. Returns why that is
    not possible, or ""; `purpose` says what they are for."""
    if not (missing := find_missing(package_of)):
        return ""
    wanted = f"missing, {purpose}: {', '.join(missing)}"
    if not shutil.which("apt-get"):
        return f"{wanted}; there is no apt-get to install them"
    if os.geteuid() != 0:
        return f"{wanted}; only root can install them"
    with (Path(tempfile.gettempdir()) / "echelon-install-packages.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not find_missing(package_of):
            return ""
        said = run_apt("install", *missing)
        if said and not (said := run_apt("update")):
            said = run_apt("install", *missing)
    return f"apt-get could not install {', '.join(missing)}: {said}" if said else ""


def find_missing(package_of: Mapping[str, str]) -> list[str]:
    """Return the packages of the programs that are not on the PATH."""
    return [
        package
        for program, package in package_of.items()
        if not shutil.which(program, path=SEARCH_PATH)
    ]


def run_apt(*words: str) -> str:
    """Run apt-get, after another one that is at work. Returns the last line of a failure, or ""."""
    deadline = time.monotonic() + BUSY_S
    while True:
        done = subprocess.run(
            ["apt-get", *OPTIONS, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if done.returncode == 0:
            return ""
        # The lock of its lists is one that apt does not wait for.
        if "Could not get lock" not in done.stderr or time.monotonic() > deadline:
            return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        time.sleep(1.0)
