"""The hosts of launch=ssh, as they were typed or as a hostfile lists them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from echelon.config.schema import LaunchConfig
from echelon.config.validate import is_safe_host
from echelon.errors import EchelonError, Fault
from echelon.utils.os_errors import format_os_error_reason


class SshHost(NamedTuple):
    """One host, and how many processes it gets."""

    name: str
    """As ssh knows it."""
    procs: int | None
    """None: one per device that is visible there."""


def list_hosts(launch: LaunchConfig) -> list[SshHost]:
    """Return the hosts of `launch.hosts`, then those of `launch.hostfile`; node 0 is the first."""
    hosts = [SshHost(name, launch.procs) for name in launch.hosts]
    if launch.hostfile:
        hosts += _read_hostfile(Path(launch.hostfile), launch.procs)
    counts = Counter(host.name for host in hosts)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise EchelonError(
            Fault(
                f"launch.hostfile={launch.hostfile}: {', '.join(twice)} is named more than once",
                "name each host once, with `slots=PROCESSES` where it gets several",
            )
        )
    return hosts


def _read_hostfile(path: Path, procs: int | None) -> list[SshHost]:
    """Return the hosts of a file. Raises an EchelonError with the faults of all lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(
                f"launch.hostfile={path} cannot be read: {reason}",
                "give a file with a line per machine: HOST or HOST slots=PROCESSES",
            )
        ) from None
    parsed = list(_parse_lines(text, path, procs))
    faults = [each for each in parsed if isinstance(each, Fault)]
    if not parsed:
        faults = [Fault(f"launch.hostfile={path} lists no host", "write one per line")]
    if faults:
        raise EchelonError(*faults)
    return [each for each in parsed if isinstance(each, SshHost)]


def _parse_lines(text: str, path: Path, procs: int | None) -> Iterator[SshHost | Fault]:
    """A host or a fault for each line that is not empty."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if not is_safe_host(words[0]) or (len(words) > 1 and slots is None):
            yield Fault(
                f"{path}, line {number}: {line.strip()!r} is not a host",
                "write HOST or HOST slots=PROCESSES, and `#` before a comment",
            )
        else:
            yield SshHost(words[0], int(slots[1]) if slots else procs)
