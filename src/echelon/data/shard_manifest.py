"""The list of shards that `echelon data pack` keeps beside them, as `shards.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.utils.files import read_json_object, replace_file

MANIFEST_NAME = "shards.json"
TEMPORARY_PREFIX = ".packing-"
"""What a killed process may leave in a folder of shards begins so."""
_VERSION = 1
_READ_BYTES = 1 << 20


class ShardEntry(NamedTuple):
    """One whole shard."""

    name: str
    samples: int
    size_bytes: int
    sha256: str


@dataclass
class ShardManifest:
    """What a folder of shards has, and what it was made of."""

    plan: dict[str, Any]
    """Format, size and source. Shards of another plan do not belong to these."""
    shards: dict[str, ShardEntry] = field(default_factory=dict)
    """Those that are whole, by name."""
    class_names: list[str] = field(default_factory=list)
    """Of pictures: what the labels 0, 1, … mean."""
    is_complete: bool = False

    def write(self, folder: Path) -> None:
        """Replace the file in a folder."""
        ordered = [self.shards[name]._asdict() for name in sorted(self.shards)]
        data = {"version": _VERSION, **asdict(self), "shards": ordered}
        with replace_file(
            folder / MANIFEST_NAME, durable=True, prefix=TEMPORARY_PREFIX
        ) as temporary:
            temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> ShardManifest | None:
    """Return the list of a folder, or None where it has none. Raises where it cannot be read."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    data = read_json_object(path) or {}
    try:
        if data["version"] != _VERSION:
            raise ValueError
        entries = [ShardEntry(**entry) for entry in data["shards"]]
        return ShardManifest(
            data["plan"],
            {entry.name: entry for entry in entries},
            data["class_names"],
            data["is_complete"],
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"{path} is not a list of shards of this version"
        raise EchelonError(Fault(what, "move it away, or pack into another folder")) from error


def compute_sha256(file: Path) -> str:
    """Return the checksum of a file, as the program `sha256sum` prints it."""
    checksum = hashlib.sha256()
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            checksum.update(data)
    return checksum.hexdigest()


def find_difference(file: Path, entry: ShardEntry) -> str | None:
    """Return why a file is not the shard of the list; None if it is."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return f"it is missing, and {MANIFEST_NAME} lists it"
    if size != entry.size_bytes:
        return f"it has {size:,} bytes, and {MANIFEST_NAME} says {entry.size_bytes:,}"
    if compute_sha256(file) != entry.sha256:
        return f"its bytes are others than those of {MANIFEST_NAME}"
    return None
