"""Which snapshot a run goes on from, and whether it is this run's at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echelon.config.schema import Config, differences
from echelon.errors import EchelonError, Exit, Fault
from echelon.runs import Run, require_same_numbers
from echelon.train.snapshots import Snapshot, SnapshotDamaged, by_name, newest, verify


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
        then = snapshot.info.get("config", {})
        require_same_numbers(run, then, config, snapshot.folder)
        say(f"going on with run {run.name} after step {snapshot.step}")
    return snapshot


def _given(path: Path, config: Config, say: Callable[[str], None]) -> Snapshot:
    """A snapshot of any run by its path: what differs is said, and is the user's wish."""
    try:
        snapshot = verify(by_name(path))
    except SnapshotDamaged as error:
        raise EchelonError(
            Fault(
                f"trainer.resume={path} is no valid snapshot: {error}",
                "give a folder such as runs/NAME/snapshots/step-000000100",
            ),
            exit=Exit.NOT_FOUND,
        ) from None
    different = differences(snapshot.info.get("config", {}), config.numbers())
    for key, (then, now) in different.items():
        say(f"note: {key}={now}, in the snapshot it was {then}")
    say(f"going on from {snapshot.folder} after step {snapshot.step}")
    return snapshot
