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

from echelon.errors import EchelonError, Exit, Fault, nearest
from echelon.runs import BEST, MANIFEST, open_run
from echelon.train.pieces import join, parts_and_pieces
from echelon.utils.os_errors import describe_os_error

FORMAT = 1
STATE = "state.json"

BLOCK_BYTES = 16 << 20
"""What one thread verifies at a time; part of the format, since checksums are made of blocks."""
CHUNK_BYTES = 1 << 20
"""Read, hash and write in pieces that stay in a core's cache; 256 KiB is 30 % slower."""
_MANIFEST_MAX_BYTES = 1 << 20
_VERIFY_THREADS = 8

_STEP_FOLDER = re.compile(r"step-([0-9]{9,18})")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class SnapshotDamaged(Exception):
    """A folder is not a whole snapshot; the message says which file and why."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was whole when it was verified."""

    folder: Path
    step: int
    info: dict[str, Any]
    """What the caller of ``Writer.save`` gave."""
    pieces: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of every part: itself, or one of each rank, where the ranks held it together."""
    best: bool = False
    """Was the best so far when it was saved."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.pieces)

    def load(self, part: str) -> Any:
        """One part, whole. Tensors are mapped, not read: bytes nobody touches are never loaded."""
        found = [self._load(piece) for piece in self.pieces.get(part, [part])]
        return found[0] if len(found) == 1 else join(found)

    def _load(self, piece: str) -> Any:
        path = self.folder / part_file(piece)
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


@dataclass(frozen=True)
class Damaged:
    """A folder that should be a snapshot and is not."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one file."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    best: bool
    files: Mapping[str, Entry]


# Choosing ------------------------------------------------------------------------------------


def newest(root: Path) -> tuple[Snapshot | None, list[Damaged]]:
    """The newest snapshot that verifies, and the damaged ones that are newer than it."""
    try:
        folders = listed(root)
    except OSError as error:
        # Starting over in silence because of a permission would be the worst answer.
        return None, [Damaged(root, f"cannot be listed: {describe_os_error(error)}")]
    damaged: list[Damaged] = []
    for folder in reversed(folders):
        try:
            return verify(folder), damaged
        except SnapshotDamaged as error:
            damaged.append(Damaged(folder, str(error)))
    return None, damaged


def listed(root: Path) -> list[Path]:
    """The step folders, oldest first; cheap, nothing is verified."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    steps = {name: step_of(name) for name in names}
    ordered = sorted((step, name) for name, step in steps.items() if step is not None)
    return [root / name for _, name in ordered]


def best(root: Path) -> Path | None:
    """The folder of the newest snapshot saved as the best; not verified."""
    try:
        with open(root / BEST, encoding="ascii") as file:
            name = file.read(100).strip()
    except (OSError, ValueError):
        return None
    return root / name if step_of(name) is not None and (root / name).is_dir() else None


def by_name(path: Path) -> Path:
    """The folder itself, or the one that `best` beside it names."""
    return (best(path.parent) if path.name == BEST else None) or path


def folder_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None if it is not the one name its step would have."""
    match = _STEP_FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and folder_name(step) == name else None


def part_file(part: str) -> str:
    if not _PLAIN_NAME.fullmatch(part):
        raise ValueError(f"a part's name is made of letters, digits, '_', '-' and '.': {part!r}")
    return f"{part}.pt"


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The model's weights by name, whole, however many ranks wrote them: of a snapshot's folder,
    of a run's `snapshots/best`, or of the newest snapshot of a run: its folder, its name in ./runs,
    or `latest`."""
    path = by_name(Path(folder))
    if not path.exists() and path.parent.name == "snapshots":
        raise EchelonError(
            Fault(f"there is no snapshot {path}", _kept(path.parent)), exit=Exit.NOT_FOUND
        )
    if not path.exists():
        path = _run_of(str(folder))
    try:
        if (path / "snapshots").is_dir():
            path = path / "snapshots"
            snapshot, damaged = newest(path)
            if snapshot is None:
                raise SnapshotDamaged(damaged[0].reason if damaged else "none was saved")
            for bad in damaged:
                instead = f"its weights are left out, and {snapshot.folder.name}'s taken"
                print(
                    f"warning: {bad.folder} is damaged ({bad.reason}); {instead}", file=sys.stderr
                )
        else:
            snapshot = verify(path)
    except SnapshotDamaged as error:
        raise EchelonError(
            Fault(
                f"there is no valid snapshot in {path}: {error}",
                "give a folder such as runs/NAME or runs/NAME/snapshots/step-000000100",
            ),
            exit=Exit.NOT_FOUND,
        ) from None
    weights: dict[str, torch.Tensor] = snapshot.load("model")
    return weights


def _run_of(name: str) -> Path:
    """By its name in ./runs; one that is not there is answered with those that have weights."""
    try:
        return open_run(name).folder
    except EchelonError as error:
        folders = {root.parent for root in Path("runs").glob("*/snapshots") if listed(root)}
        known = {folder.name for folder in folders if not folder.is_symlink()}
        if error.exit is not Exit.NOT_FOUND:
            raise
        do = nearest(name, known) if known else "train one with `echelon train`"
        raise EchelonError(Fault(error.faults[0].what, do), exit=error.exit) from None


def _kept(root: Path) -> str:
    names = [folder.name for folder in listed(root)]
    return f"kept are {', '.join(names)} in {root}" if names else f"none is kept in {root}"


# Verifying -----------------------------------------------------------------------------------


def verify(folder: Path) -> Snapshot:
    """The snapshot in this folder, every byte of it checked; else :class:`SnapshotDamaged`."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry.size)
    _check_sums(folder, manifest.files)
    info = _checked(STATE, lambda: json.loads((folder / STATE).read_bytes()))
    if not isinstance(info, dict):
        raise SnapshotDamaged(f"{STATE}: not a JSON object")
    try:
        pieces = parts_and_pieces(name[:-3] for name in manifest.files if name.endswith(".pt"))
    except ValueError as error:
        raise SnapshotDamaged(str(error)) from None
    return Snapshot(folder, manifest.step, info, pieces, manifest.best)


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked against itself and the folder's name."""
    size = _regular_size(folder / MANIFEST)
    if size > _MANIFEST_MAX_BYTES:
        raise SnapshotDamaged(f"{MANIFEST}: {size} bytes, too large to be one")
    data: bytes = _checked(MANIFEST, lambda: (folder / MANIFEST).read_bytes())
    body = _checked(MANIFEST, lambda: json.loads(data))
    if not isinstance(body, dict):
        raise SnapshotDamaged(f"{MANIFEST}: not a JSON object")
    body.pop("checksum", None)
    # Compared as bytes, so that no flipped bit can hide in a spelling JSON holds equal.
    if _checked(MANIFEST, lambda: _render(body)) != data:
        raise SnapshotDamaged(f"{MANIFEST}: checksum differs")
    if body.get("format") != FORMAT:
        raise SnapshotDamaged(f"{MANIFEST}: format {body.get('format')!r}, this reads {FORMAT}")
    manifest = _parse(body)
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise SnapshotDamaged(f"{MANIFEST}: written for step {manifest.step}")
    return manifest


def render_manifest(manifest: Manifest) -> bytes:
    files = {name: {"size": e.size, "checksum": e.checksum} for name, e in manifest.files.items()}
    return _render({"format": FORMAT, "step": manifest.step, "best": manifest.best, "files": files})


def _render(body: dict[str, Any]) -> bytes:
    own = xxhash.xxh3_128_hexdigest(json.dumps(body).encode())
    return json.dumps({**body, "checksum": own}, indent=1).encode() + b"\n"


def _parse(body: dict[str, Any]) -> Manifest:
    """A checksum only shows that nothing changed, not that we wrote it: types are checked."""
    try:
        step, best, files = body["step"], body["best"], body["files"]
        entries = {name: Entry(file["size"], file["checksum"]) for name, file in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise SnapshotDamaged(f"{MANIFEST}: not a manifest") from error
    sound = type(step) is int and step >= 0 and type(best) is bool and STATE in entries
    for name, entry in entries.items():
        sound &= bool(_PLAIN_NAME.fullmatch(name)) and type(entry.size) is int
    if not sound:
        raise SnapshotDamaged(f"{MANIFEST}: not a manifest")
    return Manifest(step, best, entries)


def _check_size(path: Path, size: int) -> None:
    found = _regular_size(path)
    if found != size:
        raise SnapshotDamaged(f"{path.name}: {found} bytes instead of {size}")


def _regular_size(path: Path) -> int:
    """Asked before opening: opening a FIFO would wait for ever."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise SnapshotDamaged(f"{path.name}: missing") from None
    except OSError as error:
        raise SnapshotDamaged(f"{path.name}: {describe_os_error(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotDamaged(f"{path.name}: not a regular file")
    return status.st_size


def _checked(name: str, read: Callable[[], Any]) -> Any:
    """Whatever reading garbage raises, as damage of the file ``name``."""
    try:
        return read()
    except OSError as error:
        raise SnapshotDamaged(f"{name}: {describe_os_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SnapshotDamaged(f"{name}: not JSON") from error


# Checksums -----------------------------------------------------------------------------------
# xxh3_128 by measurement (600 MB in the page cache, 2 cores, read + hash): xxh3_128 0.044 s
# (0.033 s of it reading), zlib.crc32 0.18 s, sha1 0.37 s, sha256 0.39 s, blake2b 0.72 s; with
# two threads xxh3 takes 0.025 s. xxh3_64 is no faster. It finds accidents, not attackers.


class Checksum:
    """The hash of a file's block hashes, so that blocks can be verified in parallel."""

    def __init__(self) -> None:
        self._sealed: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while data:
            piece = data[: BLOCK_BYTES - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._sealed.append(self._block.digest())
                self._block, self._filled = xxhash.xxh3_128(), 0

    def hexdigest(self) -> str:
        last = [self._block.digest()] if self._filled else []
        return _joined(self._sealed + last)


def _joined(blocks: list[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def _check_sums(folder: Path, files: Mapping[str, Entry]) -> None:
    blocks = [
        (folder / name, start)
        for name, entry in files.items()
        for start in range(0, entry.size, BLOCK_BYTES)
    ]
    # A small snapshot is hashed sooner than threads start.
    total = sum(entry.size for entry in files.values())
    threads = min(_VERIFY_THREADS, cores(), total // BLOCK_BYTES)
    hashed = _hash_blocks(blocks, threads)
    for name, entry in files.items():
        mine = [
            digest for (path, _), digest in zip(blocks, hashed, strict=True) if path.name == name
        ]
        if _joined(mine) != entry.checksum:
            raise SnapshotDamaged(f"{name}: checksum differs")


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
        raise SnapshotDamaged(f"{path.name}: {describe_os_error(error)}") from error
    return digest.digest()


def cores() -> int:
    """Those this process may use; macOS does not say and gives all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
