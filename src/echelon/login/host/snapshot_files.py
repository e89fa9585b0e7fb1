"""Snapshots of a run, as they are sent to the laptop that asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.login.frames import MAX_DATA_BYTES, send_frame
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import MANIFEST_FILE, find_best, list_snapshots


def send_snapshots(stream: BinaryIO, run: Run, which: str, have: dict[str, int]) -> None:
    """Send the best, the newest (`last`) or all snapshots.

    ``have`` is how much of each file the laptop has from a try that was cut short.
    """
    best = find_best(run.snapshots_folder)
    chosen = _choose(run, which, best)
    send_frame(
        stream,
        {
            "snapshots": [folder.name for folder in chosen],
            "best": best.name if best else None,
            "size": sum(f.stat().st_size for folder in chosen for f in _list_files(folder)),
        },
    )
    for folder in chosen:
        for file in _list_files(folder):
            _send_file(stream, folder, file, have)
        send_frame(stream, {"complete": folder.name})


def _choose(run: Run, which: str, best: Path | None) -> list[Path]:
    folders = [f for f in list_snapshots(run.snapshots_folder) if (f / MANIFEST_FILE).is_file()]
    if which == "best" and best is None and folders:
        raise EchelonError(
            Fault(
                f"run {run.name} has no best snapshot, as nothing was evaluated yet",
                "take the newest: leave out --best",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    if not folders:
        raise EchelonError(
            Fault(
                f"run {run.name} has saved no snapshot yet",
                "wait for trainer.save, or see `echelon show`",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    if which == "all":
        return folders
    return [best] if which == "best" and best else folders[-1:]


def _list_files(folder: Path) -> list[Path]:
    """Return all files of a snapshot, the manifest last: without it a folder is none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: path.name == MANIFEST_FILE)


def _send_file(stream: BinaryIO, folder: Path, file: Path, have: dict[str, int]) -> None:
    name = f"{folder.name}/{file.relative_to(folder)}"
    size = file.stat().st_size
    at = have.get(name, 0) if have.get(name, 0) <= size else 0
    with file.open("rb") as opened:
        opened.seek(at)
        while True:
            data = opened.read(MAX_DATA_BYTES)
            send_frame(stream, {"part": name, "offset": at, "size": size}, data)
            at += len(data)
            if at >= size or not data:
                return
