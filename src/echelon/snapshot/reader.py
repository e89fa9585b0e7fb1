"""Reading snapshots: which one is the newest that is valid, and what is in it.

A snapshot is a folder ``ROOT/step-000000123/`` with one file per part (``model.pt``,
``optimizer.pt``, …; of a sharded model one per part and rank, see `shards`), each readable by plain
``torch.load(path, weights_only=True)``; ``state.json`` (the position of the run and other JSON);
and ``manifest.json``, written last, with the size and checksum of every other file. A folder is a
snapshot if all of this verifies. Files that the manifest does not name (an editor's, NFS's) are
ignored. A snapshot that was evaluated after it was saved also has ``evaluation.json``; its values
replace those of ``state.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.snapshot.layout import (
    EMA_NAME,
    EVALUATION_FILE,
    EXAMPLE_FOLDER,
    STATE_FILE,
    STATE_PART,
    list_snapshots,
    resolve_best,
)
from echelon.snapshot.manifest import (
    InvalidSnapshotError,
    check_checksums,
    check_size,
    convert_read_errors,
    format_part_name,
    read_manifest,
)
from echelon.snapshot.shards import group_shard_names, join_shards
from echelon.utils.os_errors import format_os_error_reason


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was valid when it was verified."""

    folder: Path
    step: int
    info: dict[str, Any]
    """What the caller of ``SnapshotWriter.save`` gave, with what ``record_evaluation`` changed."""
    part_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of every part: itself, or one of each rank, where the ranks held it together."""
    is_best: bool = False
    """Was the best so far when it was saved."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts: ``model``, ``optimizer``, ``rng``."""
        return tuple(self.part_files)

    def load_part(self, part: str) -> Any:
        """Return one part, joined from the files of all ranks where they wrote shards.

        Tensors are mapped, not read: bytes that nobody touches are never loaded.
        """
        loaded = [self._load_file(piece) for piece in self.part_files.get(part, [part])]
        return loaded[0] if len(loaded) == 1 else join_shards(loaded)

    def iter_files(self, part: str) -> Iterator[tuple[str, Any]]:
        """Yield each file of a part as it was written, with its name: one of every rank, where
        they wrote shards."""
        for name in self.part_files.get(part, ()):
            yield name, self._load_file(name)

    def _load_file(self, name: str) -> Any:
        path = self.folder / format_part_name(name)
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


@dataclass(frozen=True)
class DamagedSnapshot:
    """A folder that is named like a snapshot and is not a valid one."""

    folder: Path
    reason: str


# Choosing ------------------------------------------------------------------------------------


def find_newest(
    root: Path, find_flaw: Callable[[Snapshot], str | None] = lambda snapshot: None
) -> tuple[Snapshot | None, list[DamagedSnapshot]]:
    """Return the newest snapshot that verifies, or None, and the damaged ones that are newer
    than it. ``find_flaw`` may refuse one that verifies, by returning why."""
    try:
        folders = list_snapshots(root)
    except OSError as error:
        # Starting over in silence because of a permission would be the worst answer.
        return None, [DamagedSnapshot(root, f"cannot be listed: {format_os_error_reason(error)}")]
    damaged: list[DamagedSnapshot] = []
    for folder in reversed(folders):
        try:
            snapshot = verify_snapshot(folder)
            flaw = find_flaw(snapshot)
        except InvalidSnapshotError as error:
            flaw = str(error)
        if flaw is None:
            return snapshot, damaged
        damaged.append(DamagedSnapshot(folder, flaw))
    return None, damaged


def load_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the weights of a trained model by parameter name, on the CPU.

        model.load_state_dict(echelon.load_weights("latest"))
        model.load_state_dict(echelon.load_weights("runs/NAME/snapshots/best"))

    The weights are whole, whatever number of ranks wrote them. Of a run with trainer.ema they are
    the average, which was evaluated. The files are mapped into memory, so
    values are read from the disk only when they are used.

    Parameters:

    folder  The folder of a snapshot, or a run: its folder, its name in ./runs, or "latest". Of a
            run the newest valid snapshot is used; damaged ones are skipped with a warning.

    Raises echelon.errors.EchelonError if there is no valid snapshot. Files are verified by their
    checksums and loaded with weights_only=True, so a snapshot cannot run code.
    """
    path = resolve_best(Path(folder))
    if not path.exists() and path.parent.name == "snapshots":
        raise EchelonError(
            Fault(f"there is no snapshot {path}", describe_existing_snapshots(path.parent)),
            exit=ExitCode.NOT_FOUND,
        )
    if not path.exists():
        path = find_run_folder(str(folder))
    try:
        if (path / "snapshots").is_dir():
            snapshot = find_newest_of_run(path / "snapshots")
        else:
            snapshot = verify_snapshot(path)
    except InvalidSnapshotError as error:
        raise _make_no_snapshot_error(path, str(error)) from None
    return load_trained_weights(snapshot)


def load_trained_weights(snapshot: Snapshot) -> dict[str, Any]:
    """Return the state of the model that was evaluated: with `trainer.ema` the average of the
    weights, otherwise the weights themselves."""
    weights: dict[str, Any] = snapshot.load_part("model")
    if EMA_NAME in snapshot.parts:  # of an experiment with a step of its own
        averages: dict[str, Any] = snapshot.load_part(EMA_NAME)
    elif STATE_PART in snapshot.parts:
        averages = snapshot.load_part(STATE_PART).get(EMA_NAME, {})
    else:
        averages = {}
    return weights | averages


def find_newest_of_run(root: Path) -> Snapshot:
    """Return the newest valid snapshot in the snapshots folder of a run; damaged ones are skipped
    with a warning. Raises EchelonError if there is none."""
    snapshot, damaged = find_newest(root)
    if snapshot is None:
        raise _make_no_snapshot_error(root, damaged[0].reason if damaged else "none was saved")
    for bad in damaged:
        instead = f"its weights are left out, and {snapshot.folder.name}'s taken"
        print(f"warning: {bad.folder} is damaged ({bad.reason}); {instead}", file=sys.stderr)
    return snapshot


def _make_no_snapshot_error(path: Path, reason: str) -> EchelonError:
    return EchelonError(
        Fault(
            f"there is no valid snapshot in {path}: {reason}",
            f"give a folder such as runs/NAME or {EXAMPLE_FOLDER}",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def find_run_folder(name: str) -> Path:
    """Return the folder of a run by its path or its name in ./runs. The error for an unknown name
    suggests only runs that have weights."""
    from echelon.runs.find import find_run

    try:
        return find_run(name).folder
    except EchelonError as error:
        folders = {root.parent for root in Path("runs").glob("*/snapshots") if list_snapshots(root)}
        known = {folder.name for folder in folders if not folder.is_symlink()}
        if error.exit is not ExitCode.NOT_FOUND:
            raise
        do = suggest_nearest(name, known) if known else "train one with `echelon train`"
        raise EchelonError(Fault(error.faults[0].what, do), exit=error.exit) from None


def describe_existing_snapshots(root: Path) -> str:
    """Return which snapshots there are, as the hint of an error."""
    names = [folder.name for folder in list_snapshots(root)]
    return f"kept are {', '.join(names)} in {root}" if names else f"none is kept in {root}"


# Verifying -----------------------------------------------------------------------------------


def verify_snapshot(folder: Path) -> Snapshot:
    """Return the snapshot in this folder after every byte of it was checked.

    Raises :class:`InvalidSnapshotError` with the file and the reason.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        check_size(folder / name, entry.size_bytes)
    check_checksums(folder, manifest.files)
    info = _read_info(folder, STATE_FILE)
    if EVALUATION_FILE in manifest.files:
        info |= _read_info(folder, EVALUATION_FILE)
    try:
        pieces = group_shard_names(name[:-3] for name in manifest.files if name.endswith(".pt"))
    except ValueError as error:
        raise InvalidSnapshotError(str(error)) from None
    return Snapshot(folder, manifest.step, info, pieces, manifest.is_best)


def _read_info(folder: Path, name: str) -> dict[str, Any]:
    info = convert_read_errors(name, lambda: json.loads((folder / name).read_bytes()))
    if not isinstance(info, dict):
        raise InvalidSnapshotError(f"{name}: not a JSON object")
    return info
