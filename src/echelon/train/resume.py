"""Which snapshot a run goes on from, and whether it is this run's at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.config.schema import Config, differences
from echelon.errors import EchelonError, Exit, Fault
from echelon.runs import Run
from echelon.train.snapshots import Snapshot, SnapshotDamaged, newest, verify


def choose(config: Config, run: Run, say: Callable[[str], None]) -> Snapshot | None:
    """Called on rank 0 alone."""
    resume = config.trainer.resume
    if resume == "never":
        return None
    if resume != "auto":
        return _given(Path(resume), config, say)
    snapshot, damaged = newest(run.snapshots)
    for bad in damaged:
        instead = f"going on from {snapshot.folder.name}" if snapshot else "starting anew"
        say(f"warning: {bad.folder} is damaged ({bad.reason}); {instead}")
    if snapshot is not None:
        _require_same_numbers(snapshot, config, run)
        say(f"going on with run {run.name} after step {snapshot.step}")
    return snapshot


def _given(path: Path, config: Config, say: Callable[[str], None]) -> Snapshot:
    """A snapshot of any run by its path: what differs is said, and is the user's wish."""
    try:
        snapshot = verify(path)
    except SnapshotDamaged as error:
        raise EchelonError(
            Fault(
                f"trainer.resume={path} is no valid snapshot: {error}",
                "give a folder such as runs/NAME/snapshots/step-000000100",
            ),
            exit=Exit.NOT_FOUND,
        ) from None
    for key, (then, now) in _different(snapshot, config).items():
        say(f"note: {key}={now}, in the snapshot it was {then}")
    return snapshot


def _require_same_numbers(snapshot: Snapshot, config: Config, run: Run) -> None:
    different = _different(snapshot, config)
    if different:
        raise EchelonError(
            *(
                Fault(
                    f"{key}={now}, but run {run.name} was trained with {key}={then}",
                    "set it back, choose another run.name, or take the snapshot on purpose with "
                    f"trainer.resume={snapshot.folder}",
                )
                for key, (then, now) in different.items()
            )
        )


def _different(snapshot: Snapshot, config: Config) -> dict[str, tuple[Any, Any]]:
    return differences(snapshot.info.get("config", {}), config.numbers())
