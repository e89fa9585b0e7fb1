"""The programs a cluster needs, and the Debian packages they come in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shell import CannotBeMade, works

PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
ACCOUNTING_PACKAGE_OF = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
# Debian asks this file whether a package may start its services; 101 is no.
POLICY = Path("/usr/sbin/policy-rc.d")
MACHINES_POLICY = POLICY.with_name("policy-rc.d.before-echelon")
OUR_POLICY = "#!/bin/sh\n# echelon cluster: install, start nothing\nexit 101\n"


def find(program: str) -> str | None:
    """Return the path of a program, also from the folders for administrators."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def check_machine() -> None:
    """Raise one sentence where a cluster cannot be made."""
    if os.geteuid() != 0:
        raise CannotBeMade("the test cluster needs root to make network namespaces")
    if not find("unshare") or not find("nsenter"):
        raise CannotBeMade("the test cluster needs unshare and nsenter (util-linux)")
    if not works(["unshare", "--net", "--uts", "true"]):
        raise CannotBeMade("this machine does not let root make network namespaces")


def install_missing(accounting: bool) -> None:
    """Install the Debian packages of programs that are missing; no service is started."""
    wanted = {**PACKAGE_OF, **(ACCOUNTING_PACKAGE_OF if accounting else {})}
    missing = sorted({package for program, package in wanted.items() if not find(program)})
    if not missing:
        return
    if not find("apt-get"):
        raise CannotBeMade(f"missing, with no apt-get to install them: {', '.join(missing)}")
    print(f"installing {' '.join(missing)}", flush=True)
    with _services_stay_off():
        if _apt("install", *missing) and _apt("update") + _apt("install", *missing):
            raise CannotBeMade(f"apt-get could not install {', '.join(missing)}")


def _apt(*words: str) -> int:
    options = ["-y", "-q", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", *options, *words], stdin=subprocess.DEVNULL, capture_output=True, env=env
    )
    return done.returncode


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keep the machine's own sshd, slurmd or database from starting with their installation."""
    remove_policy()
    if POLICY.exists():
        POLICY.rename(MACHINES_POLICY)
    POLICY.write_text(OUR_POLICY)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        remove_policy()


def remove_policy() -> None:
    """Restore the machine's own policy for starting services."""
    if POLICY.exists() and POLICY.read_text() == OUR_POLICY:
        POLICY.unlink()
    if MACHINES_POLICY.exists():
        MACHINES_POLICY.replace(POLICY)
