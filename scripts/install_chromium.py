"""Install Debian's Chromium and its driver, with which tests and benchmarks open pages.

    python3 scripts/install_chromium.py

Does nothing where both are there. Where they cannot be had it says why in one sentence, and ends
with 3.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGE_OF = {"chromium": "chromium", "chromedriver": "chromium-driver"}
CANNOT_BE_HAD = 3
OPTIONS = ("-y", "-q", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300")
BUSY_S = 300.0


def find_missing() -> list[str]:
    """Return the packages of the programs that are not on the PATH."""
    return [package for program, package in PACKAGE_OF.items() if not shutil.which(program)]


def install_missing() -> str:
    """Install what is missing, one process at a time. Returns why that is not possible, or ""."""
    if not (missing := find_missing()):
        return ""
    wanted = f"missing, to open pages with: {', '.join(missing)}"
    if not shutil.which("apt-get"):
        return f"{wanted}; there is no apt-get to install them"
    if os.geteuid() != 0:
        return f"{wanted}; only root can install them"
    with (Path(tempfile.gettempdir()) / "echelon-install-chromium.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not find_missing():
            return ""
        said = run_apt("install", *missing)
        if said and not (said := run_apt("update")):
            said = run_apt("install", *missing)
    return f"apt-get could not install {', '.join(missing)}: {said}" if said else ""


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


if __name__ == "__main__":
    if reason := install_missing():
        print(reason, file=sys.stderr)
        sys.exit(CANNOT_BE_HAD)
