"""Which version of Slurm is here, and the options of sbatch that it does not know."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.runs.slurm_queue import run_slurm_command


class SlurmVersion(NamedTuple):
    """Year and month of a release."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year}.{self.month:02}"


_ADDED: Mapping[str, SlurmVersion] = {
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), SlurmVersion(19, 5)),
    **dict.fromkeys(("gpus-per-socket", "cpus-per-gpu", "mem-per-gpu"), SlurmVersion(19, 5)),
    "ntasks-per-gpu": SlurmVersion(20, 11),
    **dict.fromkeys(("container", "context"), SlurmVersion(21, 8)),
    "prefer": SlurmVersion(22, 5),
    **dict.fromkeys(("container-id", "extra", "tres-per-task"), SlurmVersion(23, 2)),
    "tres-bind": SlurmVersion(23, 11),
    **dict.fromkeys(("resv-ports", "segment", "stepmgr"), SlurmVersion(24, 5)),
    "exclusive=topo": SlurmVersion(24, 5),
    "oom-kill-step": SlurmVersion(24, 11),
    "external": SlurmVersion(25, 5),
    **dict.fromkeys(("consolidate-segments", "spread-segments"), SlurmVersion(25, 11)),
}
"""Options of sbatch by the release that first has them."""
_REMOVED: Mapping[str, SlurmVersion] = {"power": SlurmVersion(24, 5)}
"""Options by the first release without them."""


def read_slurm_version() -> SlurmVersion | None:
    """Return the version of this machine's sbatch, which is asked once; None where it cannot be
    told."""
    return _ask_version(shutil.which("sbatch"))


@functools.cache
def _ask_version(sbatch: str | None) -> SlurmVersion | None:
    done = run_slurm_command(sbatch, "--version") if sbatch else None
    return parse_slurm_version(done.stdout) if done else None


def parse_slurm_version(text: str) -> SlurmVersion | None:
    """Return the version in `slurm 22.05.8`, or in what a distribution calls it."""
    found = re.search(r"slurm\S* (\d+)\.(\d+)", text)
    return SlurmVersion(int(found[1]), int(found[2])) if found else None


def require_known_options(script: str) -> None:
    """Raise an EchelonError for options in a script that the Slurm of this machine does not know.
    The version is only asked for where an option depends on it."""
    if not any(True for _ in _iter_dependent_options(script)):
        return
    version = read_slurm_version()
    if version is not None and (faults := list(find_unknown_options(script, version))):
        raise EchelonError(*faults)


def find_unknown_options(script: str, version: SlurmVersion) -> Iterator[Fault]:
    """Yield a fault for each option in a script that this version does not know."""
    for given, name in _iter_dependent_options(script):
        added, removed = _ADDED.get(name), _REMOVED.get(name)
        if added is not None and version < added:
            yield Fault(
                f"{given} is an option of Slurm {added} and later, but here is Slurm {version}",
                "set launch.gpu_request=gres"
                if name.startswith("gpus-per-")
                else "leave it out of launch.sbatch",
            )
        elif removed is not None and version >= removed:
            yield Fault(
                f"{given} is an option that Slurm has had until {removed}, but here is Slurm "
                f"{version}",
                "leave it out of launch.sbatch",
            )


def _iter_dependent_options(script: str) -> Iterator[tuple[str, str]]:
    """Yield the options in a script that not all versions know: as they are written, and their
    names in the tables."""
    for line in script.splitlines():
        if option := re.match(r"#SBATCH --(([\w-]+)(=topo)?)", line):
            known = (name for name in (option[1], option[2]) if name in {*_ADDED, *_REMOVED})
            if name := next(known, ""):
                yield line.removeprefix("#SBATCH "), name
