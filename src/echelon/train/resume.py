"""Chooses the snapshot that a run continues from, and checks that it belongs to this run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echelon.config.schema import Config, find_differences
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.create import require_same_settings, require_snapshots_kept
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import EXAMPLE_FOLDER, resolve_best
from echelon.snapshot.manifest import InvalidSnapshotError
from echelon.snapshot.reader import Snapshot, find_newest, verify_snapshot

FindFlaw = Callable[[Snapshot], str | None]
"""Return why a snapshot that is intact is not to be used, or None."""


def choose_snapshot(
    config: Config, run: Run, find_flaw: FindFlaw, report: Callable[[str], None]
) -> Snapshot | None:
    """Return the snapshot to continue from, or None to start anew. Only rank 0 calls it.

    With `trainer.resume=auto` it is the newest intact snapshot of the run; damaged ones, and those
    in which `find_flaw` finds one, are reported and skipped. A run whose snapshots are all lost
    is refused. With a path it is the snapshot there, of any run.

    With `trainer.resume=never` an older run of the name was set aside, so a snapshot in the folder
    is of this very run, which is being restarted.
    """
    resume = config.trainer.resume
    if resume not in ("auto", "never"):
        return _open_given_snapshot(Path(resume), config, find_flaw, report)
    snapshot, damaged = find_newest(run.snapshots_folder, find_flaw)
    for bad in damaged:
        instead = f"; resuming from {snapshot.folder.name}" if snapshot else ""
        report(f"warning: {bad.folder} is damaged ({bad.reason}){instead}")
    if snapshot is None:
        require_snapshots_kept(run, is_any_damaged=bool(damaged))
    else:
        then = snapshot.info.get("config", {})
        require_same_settings(run, then, config, snapshot.folder)
        report(f"resuming run {run.name} after step {snapshot.step}")
    return snapshot


def find_resume_position(config: Config, run: Run) -> list[int]:
    """Return the step and the samples of the snapshot that a run will continue from; zeros where it
    starts anew. Faults are left to `choose_snapshot`. Only rank 0 calls it."""
    resume = config.trainer.resume
    if resume in ("auto", "never"):
        snapshot, _ = find_newest(run.snapshots_folder)
    else:
        try:
            snapshot = verify_snapshot(resolve_best(Path(resume)))
        except InvalidSnapshotError:
            snapshot = None
    return [0, 0] if snapshot is None else [snapshot.info["step"], snapshot.info["samples"]]


def _open_given_snapshot(
    path: Path,
    config: Config,
    find_flaw: FindFlaw,
    report: Callable[[str], None],
) -> Snapshot:
    """Return the snapshot at a path. Settings that differ from it are reported, as the user wants
    them."""
    try:
        snapshot = verify_snapshot(resolve_best(path))
        if flaw := find_flaw(snapshot):
            raise InvalidSnapshotError(flaw)
    except InvalidSnapshotError as error:
        raise EchelonError(
            Fault(
                f"trainer.resume={path} is not a valid snapshot: {error}",
                f"give a folder such as {EXAMPLE_FOLDER}",
            ),
            exit=ExitCode.NOT_FOUND,
        ) from None
    changed_settings = find_differences(
        snapshot.info.get("config", {}), config.select_numerics_settings()
    )
    for key, (then, now) in changed_settings.items():
        report(f"note: {key}={now}, in the snapshot it was {then}")
    report(f"resuming from {snapshot.folder} after step {snapshot.step}")
    return snapshot
