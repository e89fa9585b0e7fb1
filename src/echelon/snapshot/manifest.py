"""The manifest of a snapshot, its format, and the checksums in it.

The manifest names every other file with size and checksum, and has a checksum of its own. Checksums
are hashes of the hashes of blocks, so that one file can be verified by several threads.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from echelon.snapshot.layout import MANIFEST_FILE, STATE_FILE, parse_step
from echelon.utils.os_errors import format_os_error_reason

FORMAT_VERSION = 1

BLOCK_BYTES = 16 << 20
"""What one thread verifies at a time; part of the format, since checksums are made of blocks."""
CHUNK_BYTES = 1 << 20
"""Read, hash and write in pieces that stay in a core's cache; 256 KiB is 30 % slower."""
_MANIFEST_MAX_BYTES = 1 << 20
_VERIFY_THREADS = 8
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class InvalidSnapshotError(Exception):
    """A folder is not a valid snapshot; the message says which file and why."""


@dataclass(frozen=True)
class ManifestEntry:
    """Size and checksum of one file."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a manifest holds: the step, whether it was the best, and every file."""

    step: int
    is_best: bool
    files: Mapping[str, ManifestEntry]


def format_part_name(part: str) -> str:
    """Return the file name of a part. Raises ValueError for a name that could leave the folder."""
    if not _PLAIN_NAME.fullmatch(part):
        raise ValueError(f"a part's name is made of letters, digits, '_', '-' and '.': {part!r}")
    return f"{part}.pt"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder, checked against itself and the folder's name; no other
    file is read. Raises InvalidSnapshotError."""
    size = _get_regular_size(folder / MANIFEST_FILE)
    if size > _MANIFEST_MAX_BYTES:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: {size} bytes, too large to be one")
    data: bytes = convert_read_errors(MANIFEST_FILE, lambda: (folder / MANIFEST_FILE).read_bytes())
    return parse_manifest(data, folder.name)


def parse_manifest(data: bytes, folder_name: str) -> Manifest:
    """Return the manifest in these bytes, checked against itself and the name of its folder.
    Raises InvalidSnapshotError."""
    body = convert_read_errors(MANIFEST_FILE, lambda: json.loads(data))
    if not isinstance(body, dict):
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: not a JSON object")
    body.pop("checksum", None)
    # Compared as bytes, so that no flipped bit can hide in a spelling JSON holds equal.
    if convert_read_errors(MANIFEST_FILE, lambda: _render_with_checksum(body)) != data:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: checksum differs")
    if body.get("format") != FORMAT_VERSION:
        raise InvalidSnapshotError(
            f"{MANIFEST_FILE}: format {body.get('format')!r}, this reads {FORMAT_VERSION}"
        )
    manifest = _build_manifest(body)
    named_step = parse_step(folder_name)
    if named_step is not None and named_step != manifest.step:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: written for step {manifest.step}")
    return manifest


def render_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file."""
    files = {
        name: {"size": e.size_bytes, "checksum": e.checksum} for name, e in manifest.files.items()
    }
    return _render_with_checksum(
        {"format": FORMAT_VERSION, "step": manifest.step, "best": manifest.is_best, "files": files}
    )


def _render_with_checksum(body: dict[str, Any]) -> bytes:
    """Return the JSON of a manifest with its own checksum."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body).encode())
    return json.dumps({**body, "checksum": checksum}, indent=1).encode() + b"\n"


def _build_manifest(body: dict[str, Any]) -> Manifest:
    """Return the manifest in a JSON object. Types are checked, because a checksum shows only
    that nothing changed since it was written, not that this program wrote it."""
    try:
        step, best, files = body["step"], body["best"], body["files"]
        entries = {
            name: ManifestEntry(file["size"], file["checksum"]) for name, file in files.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: not a manifest") from error
    is_sound = type(step) is int and step >= 0 and type(best) is bool and STATE_FILE in entries
    for name, entry in entries.items():
        is_sound &= bool(_PLAIN_NAME.fullmatch(name)) and type(entry.size_bytes) is int
    if not is_sound:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: not a manifest")
    return Manifest(step, best, entries)


def check_size(path: Path, expected_bytes: int) -> None:
    """Raise InvalidSnapshotError unless the file has the expected size."""
    actual_bytes = _get_regular_size(path)
    if actual_bytes != expected_bytes:
        raise InvalidSnapshotError(f"{path.name}: {actual_bytes} bytes instead of {expected_bytes}")


def _get_regular_size(path: Path) -> int:
    """Return the size of a regular file. Asked before opening: opening a FIFO would wait for
    ever."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidSnapshotError(f"{path.name}: missing") from None
    except OSError as error:
        raise InvalidSnapshotError(f"{path.name}: {format_os_error_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidSnapshotError(f"{path.name}: not a regular file")
    return status.st_size


def convert_read_errors(name: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` and report whatever reading garbage raises as damage of the file ``name``."""
    try:
        return read()
    except OSError as error:
        raise InvalidSnapshotError(f"{name}: {format_os_error_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidSnapshotError(f"{name}: not JSON") from error


# Checksums -----------------------------------------------------------------------------------
# xxh3_128 by measurement (600 MB in the page cache, 2 cores, read + hash): xxh3_128 0.044 s
# (0.033 s of it reading), zlib.crc32 0.18 s, sha1 0.37 s, sha256 0.39 s, blake2b 0.72 s; with
# two threads xxh3 takes 0.025 s. xxh3_64 is no faster. It finds accidents, not attackers.


class BlockChecksum:
    """The checksum of a file while it is written: the hash of the hashes of its blocks."""

    def __init__(self) -> None:
        self._block_digests: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while data:
            piece = data[: BLOCK_BYTES - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._block_digests.append(self._block.digest())
                self._block, self._filled = xxhash.xxh3_128(), 0

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""
        last = [self._block.digest()] if self._filled else []
        return combine_digests(self._block_digests + last)


def combine_digests(blocks: list[bytes]) -> str:
    """Return the checksum of a file whose blocks have these hashes."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def check_checksums(folder: Path, files: Mapping[str, ManifestEntry]) -> None:
    """Raise InvalidSnapshotError if the content of a file differs from the manifest."""
    blocks = [
        (folder / name, start)
        for name, entry in files.items()
        for start in range(0, entry.size_bytes, BLOCK_BYTES)
    ]
    # A small snapshot is hashed sooner than threads start.
    total = sum(entry.size_bytes for entry in files.values())
    threads = min(_VERIFY_THREADS, count_cores(), total // BLOCK_BYTES)
    hashed = _hash_blocks(blocks, threads)
    for name, entry in files.items():
        digests = [
            digest for (path, _), digest in zip(blocks, hashed, strict=True) if path.name == name
        ]
        if combine_digests(digests) != entry.checksum:
            raise InvalidSnapshotError(f"{name}: checksum differs")


def _hash_blocks(blocks: list[tuple[Path, int]], threads: int) -> list[bytes]:
    if threads < 2:
        return [_hash_block(block) for block in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_hash_block, blocks))


def _hash_block(block: tuple[Path, int]) -> bytes:
    """Return the hash of one block. Read and not mapped: a failing disk under a mapping kills
    the process with SIGBUS, under a read it raises OSError."""
    path, start = block
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            offset, end = start, start + BLOCK_BYTES
            while count := os.preadv(file, [buffer[: end - offset]], offset):
                digest.update(buffer[:count])
                offset += count
        finally:
            os.close(file)
    except OSError as error:
        raise InvalidSnapshotError(f"{path.name}: {format_os_error_reason(error)}") from error
    return digest.digest()


def count_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
