"""Snapshots on disk: what one is, which are there, and which is the newest that is whole.

A snapshot is a folder ``ROOT/step-000000123/`` with one file per part (``model.pt``,
``optimizer.pt``, …; where ranks held a part together, one of each rank, see `pieces.py`), each
readable by plain ``torch.load(path, weights_only=True)``, ``state.json`` (the run's position and
whatever else is JSON) and ``manifest.json``, written last, with the size and checksum of every
other file. A folder is a snapshot if it verifies; files the manifest does not name (an editor's,
NFS's) are neither read nor minded.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from echelon.errors import EchelonError, Exit, Fault, suggest_nearest
from echelon.runs.run_folder import BEST_FILE, MANIFEST_FILE, find_run
from echelon.snapshot.shards import group_shards, join_shards
from echelon.utils.os_errors import describe_os_error

FORMAT_VERSION = 1
STATE_FILE = "state.json"

BLOCK_BYTES = 16 << 20
"""What one thread verifies at a time; part of the format, since checksums are made of blocks."""
CHUNK_BYTES = 1 << 20
"""Read, hash and write in pieces that stay in a core's cache; 256 KiB is 30 % slower."""
_MANIFEST_MAX_BYTES = 1 << 20
_VERIFY_THREADS = 8

_STEP_FOLDER = re.compile(r"step-([0-9]{9,18})")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class InvalidSnapshotError(Exception):
    """A folder is not a whole snapshot; the message says which file and why."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was whole when it was verified."""

    folder: Path
    step: int
    info: dict[str, Any]
    """What the caller of ``Writer.save`` gave."""
    part_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of every part: itself, or one of each rank, where the ranks held it together."""
    is_best: bool = False
    """Was the best so far when it was saved."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.part_files)

    def load_part(self, part: str) -> Any:
        """One part, whole. Tensors are mapped, not read: bytes nobody touches are never loaded."""
        loaded = [self._load_file(piece) for piece in self.part_files.get(part, [part])]
        return loaded[0] if len(loaded) == 1 else join_shards(loaded)

    def _load_file(self, name: str) -> Any:
        path = self.folder / format_part_name(name)
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


@dataclass(frozen=True)
class DamagedSnapshot:
    """A folder that should be a snapshot and is not."""

    folder: Path
    describe_os_error: str


@dataclass(frozen=True)
class ManifestEntry:
    """What the manifest says of one file."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    is_best: bool
    files: Mapping[str, ManifestEntry]


# Choosing ------------------------------------------------------------------------------------


def find_newest(root: Path) -> tuple[Snapshot | None, list[DamagedSnapshot]]:
    """The newest snapshot that verifies, and the damaged ones that are newer than it."""
    try:
        folders = list_snapshots(root)
    except OSError as error:
        # Starting over in silence because of a permission would be the worst answer.
        return None, [DamagedSnapshot(root, f"cannot be listed: {describe_os_error(error)}")]
    damaged: list[DamagedSnapshot] = []
    for folder in reversed(folders):
        try:
            return verify_snapshot(folder), damaged
        except InvalidSnapshotError as error:
            damaged.append(DamagedSnapshot(folder, str(error)))
    return None, damaged


def list_snapshots(root: Path) -> list[Path]:
    """The step folders, oldest first; cheap, nothing is verified."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    steps = {name: parse_step(name) for name in names}
    ordered = sorted((step, name) for name, step in steps.items() if step is not None)
    return [root / name for _, name in ordered]


def find_best(root: Path) -> Path | None:
    """The folder of the newest snapshot saved as the best; not verified."""
    try:
        with open(root / BEST_FILE, encoding="ascii") as file:
            name = file.read(100).strip()
    except (OSError, ValueError):
        return None
    return root / name if parse_step(name) is not None and (root / name).is_dir() else None


def resolve_best(path: Path) -> Path:
    """The folder itself, or the one that `best` beside it names."""
    return (find_best(path.parent) if path.name == BEST_FILE else None) or path


def format_folder_name(step: int) -> str:
    return f"step-{step:09d}"


def parse_step(name: str) -> int | None:
    """The step of a folder's name; None if it is not the one name its step would have."""
    match = _STEP_FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and format_folder_name(step) == name else None


def format_part_name(part: str) -> str:
    if not _PLAIN_NAME.fullmatch(part):
        raise ValueError(f"a part's name is made of letters, digits, '_', '-' and '.': {part!r}")
    return f"{part}.pt"


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The model's weights by name, whole, however many ranks wrote them: of a snapshot's folder,
    of a run's `snapshots/best`, or of the newest snapshot of a run: its folder, its name in ./runs,
    or `latest`."""
    path = resolve_best(Path(folder))
    if not path.exists() and path.parent.name == "snapshots":
        raise EchelonError(
            Fault(f"there is no snapshot {path}", _describe_existing(path.parent)),
            exit=Exit.NOT_FOUND,
        )
    if not path.exists():
        path = _find_run_folder(str(folder))
    try:
        if (path / "snapshots").is_dir():
            path = path / "snapshots"
            snapshot, damaged = find_newest(path)
            if snapshot is None:
                raise InvalidSnapshotError(
                    damaged[0].describe_os_error if damaged else "none was saved"
                )
            for bad in damaged:
                instead = f"its weights are left out, and {snapshot.folder.name}'s taken"
                print(
                    f"warning: {bad.folder} is damaged ({bad.describe_os_error}); {instead}",
                    file=sys.stderr,
                )
        else:
            snapshot = verify_snapshot(path)
    except InvalidSnapshotError as error:
        raise EchelonError(
            Fault(
                f"there is no valid snapshot in {path}: {error}",
                "give a folder such as runs/NAME or runs/NAME/snapshots/step-000000100",
            ),
            exit=Exit.NOT_FOUND,
        ) from None
    weights: dict[str, torch.Tensor] = snapshot.load_part("model")
    return weights


def _find_run_folder(name: str) -> Path:
    """By its name in ./runs; one that is not there is answered with those that have weights."""
    try:
        return find_run(name).folder
    except EchelonError as error:
        folders = {root.parent for root in Path("runs").glob("*/snapshots") if list_snapshots(root)}
        known = {folder.name for folder in folders if not folder.is_symlink()}
        if error.exit is not Exit.NOT_FOUND:
            raise
        do = suggest_nearest(name, known) if known else "train one with `echelon train`"
        raise EchelonError(Fault(error.faults[0].what, do), exit=error.exit) from None


def _describe_existing(root: Path) -> str:
    names = [folder.name for folder in list_snapshots(root)]
    return f"kept are {', '.join(names)} in {root}" if names else f"none is kept in {root}"


# Verifying -----------------------------------------------------------------------------------


def verify_snapshot(folder: Path) -> Snapshot:
    """The snapshot in this folder, every byte of it checked; else :class:`SnapshotDamaged`."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry.size_bytes)
    _check_checksums(folder, manifest.files)
    info = _read_or_raise(STATE_FILE, lambda: json.loads((folder / STATE_FILE).read_bytes()))
    if not isinstance(info, dict):
        raise InvalidSnapshotError(f"{STATE_FILE}: not a JSON object")
    try:
        pieces = group_shards(name[:-3] for name in manifest.files if name.endswith(".pt"))
    except ValueError as error:
        raise InvalidSnapshotError(str(error)) from None
    return Snapshot(folder, manifest.step, info, pieces, manifest.is_best)


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked against itself and the folder's name."""
    size = _get_regular_size(folder / MANIFEST_FILE)
    if size > _MANIFEST_MAX_BYTES:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: {size} bytes, too large to be one")
    data: bytes = _read_or_raise(MANIFEST_FILE, lambda: (folder / MANIFEST_FILE).read_bytes())
    body = _read_or_raise(MANIFEST_FILE, lambda: json.loads(data))
    if not isinstance(body, dict):
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: not a JSON object")
    body.pop("checksum", None)
    # Compared as bytes, so that no flipped bit can hide in a spelling JSON holds equal.
    if _read_or_raise(MANIFEST_FILE, lambda: _render_with_checksum(body)) != data:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: checksum differs")
    if body.get("format") != FORMAT_VERSION:
        raise InvalidSnapshotError(
            f"{MANIFEST_FILE}: format {body.get('format')!r}, this reads {FORMAT_VERSION}"
        )
    manifest = _parse_manifest(body)
    named_step = parse_step(folder.name)
    if named_step is not None and named_step != manifest.step:
        raise InvalidSnapshotError(f"{MANIFEST_FILE}: written for step {manifest.step}")
    return manifest


def render_manifest(manifest: Manifest) -> bytes:
    files = {
        name: {"size": e.size_bytes, "checksum": e.checksum} for name, e in manifest.files.items()
    }
    return _render_with_checksum(
        {"format": FORMAT_VERSION, "step": manifest.step, "best": manifest.is_best, "files": files}
    )


def _render_with_checksum(body: dict[str, Any]) -> bytes:
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body).encode())
    return json.dumps({**body, "checksum": checksum}, indent=1).encode() + b"\n"


def _parse_manifest(body: dict[str, Any]) -> Manifest:
    """A checksum only shows that nothing changed, not that we wrote it: types are checked."""
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


def _check_size(path: Path, expected_bytes: int) -> None:
    actual_bytes = _get_regular_size(path)
    if actual_bytes != expected_bytes:
        raise InvalidSnapshotError(f"{path.name}: {actual_bytes} bytes instead of {expected_bytes}")


def _get_regular_size(path: Path) -> int:
    """Asked before opening: opening a FIFO would wait for ever."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidSnapshotError(f"{path.name}: missing") from None
    except OSError as error:
        raise InvalidSnapshotError(f"{path.name}: {describe_os_error(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidSnapshotError(f"{path.name}: not a regular file")
    return status.st_size


def _read_or_raise(name: str, read: Callable[[], Any]) -> Any:
    """Whatever reading garbage raises, as damage of the file ``name``."""
    try:
        return read()
    except OSError as error:
        raise InvalidSnapshotError(f"{name}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidSnapshotError(f"{name}: not JSON") from error


# Checksums -----------------------------------------------------------------------------------
# xxh3_128 by measurement (600 MB in the page cache, 2 cores, read + hash): xxh3_128 0.044 s
# (0.033 s of it reading), zlib.crc32 0.18 s, sha1 0.37 s, sha256 0.39 s, blake2b 0.72 s; with
# two threads xxh3 takes 0.025 s. xxh3_64 is no faster. It finds accidents, not attackers.


class BlockChecksum:
    """The hash of a file's block hashes, so that blocks can be verified in parallel."""

    def __init__(self) -> None:
        self._block_digests: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while data:
            piece = data[: BLOCK_BYTES - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._block_digests.append(self._block.digest())
                self._block, self._filled = xxhash.xxh3_128(), 0

    def hexdigest(self) -> str:
        last = [self._block.digest()] if self._filled else []
        return _combine_digests(self._block_digests + last)


def _combine_digests(blocks: list[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def _check_checksums(folder: Path, files: Mapping[str, ManifestEntry]) -> None:
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
        if _combine_digests(digests) != entry.checksum:
            raise InvalidSnapshotError(f"{name}: checksum differs")


def _hash_blocks(blocks: list[tuple[Path, int]], threads: int) -> list[bytes]:
    if threads < 2:
        return [_hash_block(block) for block in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_hash_block, blocks))


def _hash_block(block: tuple[Path, int]) -> bytes:
    """Read, not mapped: a failing disk under a mapping is SIGBUS, under a read an OSError."""
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
        raise InvalidSnapshotError(f"{path.name}: {describe_os_error(error)}") from error
    return digest.digest()


def count_cores() -> int:
    """Those this process may use; macOS does not say and gives all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
