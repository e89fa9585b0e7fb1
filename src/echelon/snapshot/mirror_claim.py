"""Who writes to a mirror of snapshots, as the folder of a run knows it.

Ranks read it, so nothing of the store is imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from echelon.utils.files import read_json_object, write_json_atomically


class MirrorClaim(NamedTuple):
    """Who writes to a mirror."""

    run: str
    """Of the run; stays the same when it goes on in another folder."""
    start: str
    """Of one start of it: the last one that began writes."""


def read_claim(file: Path) -> MirrorClaim | None:
    """Return as whom a folder has last written to its mirror; None if it has not."""
    known = read_json_object(file) or {}
    if not {"run", "start"} <= known.keys():
        return None
    return MirrorClaim(str(known["run"]), str(known["start"]))


def write_claim(file: Path, owner: MirrorClaim) -> None:
    """Note as whom a folder writes to its mirror."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(file, owner._asdict())
