"""The objects of a mirror: snapshots of a run in an object store, in which order they come and go.

    PREFIX/RUN/owner.json                        which run writes here, and which start of it
    PREFIX/RUN/best                              the name of the best snapshot
    PREFIX/RUN/step-000000123/model.pt, …        the files of a snapshot
    PREFIX/RUN/step-000000123/manifest.json      put last, removed first: without it there is none

An object is there as a whole or not at all, so this order makes a kill at any moment harmless. The
module imports no torch: it works in a process of its own (`mirror_process`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from echelon.object_store.object_folder import ObjectFolder
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.snapshot.layout import BEST_LINK, MANIFEST_FILE, parse_step
from echelon.snapshot.manifest import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    BlockChecksum,
    InvalidSnapshotError,
    Manifest,
    ManifestEntry,
    combine_digests,
    parse_manifest,
    read_manifest,
)
from echelon.snapshot.mirror_claim import MirrorClaim
from echelon.utils.files import flush_to_disk

OWNER_OBJECT = "owner.json"
_UPLOAD_THREADS = 2
"""Files that are sent at the same time: a snapshot of many ranks has many small ones."""
_FETCH_THREADS = 8
"""Blocks that are on their way at the same time; 16 MiB each in memory."""
_OUR_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(pt|json)")
"""What a snapshot is made of. Nothing else is ever removed."""


class MirrorTakenError(Exception):
    """Another start of the run, or another run of its name, writes to the mirror now."""


class MirrorObjects:
    """The objects of one run in a store."""

    def __init__(self, store: ObjectFolder, on_bytes: Callable[[int], None]) -> None:
        self._store = store
        self._on_bytes = on_bytes
        """Called with the number of bytes that have moved since the last call."""
        self._verified: dict[str, ManifestEntry] = {}
        """Objects that this process has put, by key: not sent again after an outage."""

    # --- who writes ---

    def read_claim(self) -> MirrorClaim | None:
        """Return who writes to the mirror; None if nobody has."""
        data = self._store.get(OWNER_OBJECT)
        try:
            body = json.loads(data) if data is not None else None
            return None if body is None else MirrorClaim(str(body["run"]), str(body["start"]))
        except (ValueError, KeyError, TypeError):
            return MirrorClaim("unknown", "unknown")  # not ours, in any case

    def write_claim(self, owner: MirrorClaim) -> None:
        """Take the mirror. It also shows that objects can be written, before the first step."""
        self._store.put(OWNER_OBJECT, json.dumps(owner._asdict()).encode() + b"\n")

    def require_owner(self, owner: MirrorClaim) -> None:
        """Raise MirrorTakenError if somebody else has taken the mirror since."""
        found = self.read_claim()
        if found is not None and found != owner:
            same = "another start of this run" if found.run == owner.run else "another run"
            raise MirrorTakenError(f"{same} writes to it now")

    # --- what is there ---

    def list_objects(self) -> dict[str, dict[str, int]]:
        """Return of every snapshot, complete or not, its files with their sizes; oldest first."""
        found: dict[str, dict[str, int]] = {}
        for key, size in self._store.list_sizes():
            name, _, file = key.partition("/")
            if parse_step(name) is not None and _OUR_FILE.fullmatch(file):
                found.setdefault(name, {})[file] = size
        return dict(sorted(found.items(), key=lambda item: parse_step(item[0]) or 0))

    def list_snapshots(self) -> list[str]:
        """Return the names of the snapshots that have a manifest, oldest first."""
        return [name for name, files in self.list_objects().items() if MANIFEST_FILE in files]

    def read_best(self) -> str | None:
        """Return the name of the best snapshot; None without one."""
        data = self._store.get(BEST_LINK)
        name = data.decode(errors="replace").strip() if data is not None else ""
        return name if parse_step(name) is not None else None

    # --- to the store ---

    def upload(self, folder: Path, owner: MirrorClaim) -> None:
        """Put a snapshot, its manifest last. What is there already is not sent again.

        Raises InvalidSnapshotError if a file on disk differs from its manifest, and OSError if it
        cannot be read.
        """
        manifest = read_manifest(folder)
        data = (folder / MANIFEST_FILE).read_bytes()
        key = f"{folder.name}/{MANIFEST_FILE}"
        there = self._store.get(key)
        if there == data:
            return
        files = _parse_files(there)
        if not files.items() <= manifest.files.items():
            # Of the same step, from before a return to an older one: from here on it is not there.
            self._store.remove([key])
            files = {}
        missing = [(n, entry) for n, entry in manifest.files.items() if files.get(n) != entry]
        with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
            for _ in pool.map(lambda file: self._upload_file(folder, *file), missing):
                pass
        # An evaluation may have been added in between; what is published is one of the two.
        self.require_owner(owner)
        self._store.put(key, data)
        if self._store.get(key) != data:
            raise _make_write_error(f"{key} was written, but what comes back differs")

    def _upload_file(self, folder: Path, name: str, entry: ManifestEntry) -> None:
        """Send one file in parts, check on the way that it is what the manifest says, and ask the
        store how large it has become."""
        key = f"{folder.name}/{name}"
        if self._verified.get(key) == entry:
            return
        checksum = BlockChecksum()
        with (
            open(folder / name, "rb") as file,
            self._store.open_writer(key, entry.size_bytes) as put,
        ):
            while data := file.read(CHUNK_BYTES):
                checksum.update(memoryview(data))
                put(data)
                self._on_bytes(len(data))
            if checksum.hexdigest() != entry.checksum:  # raised here: the object is not completed
                raise InvalidSnapshotError(f"{name}: checksum differs")
        if (size := self._store.get_size(key)) != entry.size_bytes:
            raise _make_write_error(f"{key} has {size} bytes after {entry.size_bytes} were written")
        self._verified[key] = entry

    def mark_best(self, name: str | None) -> None:
        """Make this snapshot, which is there, the best one."""
        if self.read_best() == name:
            return
        if name is None:
            self._store.remove([BEST_LINK])
        else:
            self._store.put(BEST_LINK, f"{name}\n".encode())

    def remove_old(self, step: int, keep_last: int) -> None:
        """Remove all but the last ``keep_last`` snapshots up to ``step``, and the best one; also
        what uploads of earlier steps have left that were not finished."""
        objects = {n: f for n, f in self.list_objects().items() if (parse_step(n) or 0) <= step}
        complete = [name for name, files in objects.items() if MANIFEST_FILE in files]
        kept = {*complete[-keep_last:], self.read_best()}
        for name, files in objects.items():
            if name in kept or parse_step(name) == step:
                continue
            if MANIFEST_FILE in files:
                self._store.remove([f"{name}/{MANIFEST_FILE}"])
            self._store.remove([f"{name}/{file}" for file in files if file != MANIFEST_FILE])
            self._verified = {
                k: e for k, e in self._verified.items() if not k.startswith(f"{name}/")
            }

    # --- from the store ---

    def fetch(self, name: str, hidden: Path) -> Manifest:
        """Write a snapshot into a new folder, every byte checked and flushed to disk.

        Raises InvalidSnapshotError if an object is missing, cut off or altered.
        """
        data = self._store.get(f"{name}/{MANIFEST_FILE}")
        if data is None:
            raise InvalidSnapshotError(f"{MANIFEST_FILE}: missing")
        manifest = parse_manifest(data, name)
        sizes = self.list_objects().get(name, {})
        for file, entry in manifest.files.items():
            if file not in sizes:
                raise InvalidSnapshotError(f"{file}: missing")
            if sizes[file] != entry.size_bytes:
                raise InvalidSnapshotError(
                    f"{file}: {sizes[file]} bytes instead of {entry.size_bytes}"
                )
        os.mkdir(hidden)
        blocks = [
            (file, start, min(start + BLOCK_BYTES, entry.size_bytes))
            for file, entry in manifest.files.items()
            for start in range(0, entry.size_bytes, BLOCK_BYTES)
        ]
        for file in manifest.files:
            (hidden / file).touch(exist_ok=False)  # also those without a block
        with ThreadPoolExecutor(_FETCH_THREADS) as pool:
            fetched = pool.map(lambda block: self._fetch_block(name, hidden, *block), blocks)
            digests = dict(zip(blocks, fetched, strict=True))
        for file, entry in manifest.files.items():
            if combine_digests([d for b, d in digests.items() if b[0] == file]) != entry.checksum:
                raise InvalidSnapshotError(f"{file}: checksum differs")
            flush_to_disk(hidden / file)
        (hidden / MANIFEST_FILE).write_bytes(data)
        flush_to_disk(hidden / MANIFEST_FILE)
        flush_to_disk(hidden)
        return manifest

    def _fetch_block(self, name: str, hidden: Path, file: str, start: int, end: int) -> bytes:
        """Write one block of a file to its place; return its hash."""
        block = self._store.get_range(f"{name}/{file}", start, end)
        with open(hidden / file, "r+b", buffering=0) as opened:
            opened.seek(start)
            view = memoryview(block)
            while view:
                view = view[opened.write(view) :]
        self._on_bytes(end - start)
        digest: bytes = xxhash.xxh3_128_digest(block)
        return digest


def _make_write_error(what: str) -> ObjectStoreError:
    return ObjectStoreError(StoreProblem.CHANGED, what, "write it again, from one process")


def _parse_files(data: bytes | None) -> Mapping[str, Any]:
    """Return the files that a manifest in the store names; none of one that is not valid."""
    try:
        return {} if data is None else parse_manifest(data, "").files
    except InvalidSnapshotError:
        return {"": None}  # in the place of files that no snapshot has: it is replaced
