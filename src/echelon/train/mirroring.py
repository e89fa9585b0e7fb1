"""The mirror of a run's snapshots: what a start takes from it, and the settings behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.registry import make_launcher
from echelon.object_store.urls import is_url
from echelon.runs.create import require_same_settings
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import BEST_LINK, format_folder_name, list_snapshots, parse_step
from echelon.snapshot.mirror import MirrorFailedError, MirrorProcess, SnapshotMirror
from echelon.snapshot.mirror_claim import read_claim
from echelon.snapshot.reader import find_newest, verify_snapshot

PREEMPTED_LIMIT_S = 20.0
"""How long a run that was stopped waits for its mirror, where nobody says how much time there is:
Kubernetes gives 30 s."""
QUEUE_MARGIN_S = 15.0
"""What a job that is told of its end `launch.signal_lead_s` before keeps for the rest."""
FAILED_LIMIT_S = 20.0


def begin_mirror(
    config: Config, run: Run, report: Callable[[str], None]
) -> tuple[Config, SnapshotMirror | None]:
    """Bring the snapshot that the run continues from to this machine, if it is in an object store,
    and open the run's mirror. Only rank 0 calls it, before anything is built.

    Returns the configuration, in which a snapshot that was given by its address has a path.
    """
    process = MirrorProcess()
    try:
        if is_url(config.trainer.resume):
            given = config.trainer.resume
            config = _fetch_given_snapshot(config, run, process, report)
        else:
            given = ""
        if config.trainer.mirror is not None:
            return config, _open_mirror(config, run, given, process, report)
    except BaseException:
        process.close()
        raise
    process.close()
    return config, None


def _fetch_given_snapshot(
    config: Config, run: Run, process: MirrorProcess, report: Callable[[str], None]
) -> Config:
    """Return the configuration with the path of the snapshot that it names by its address."""
    url = config.trainer.resume.rstrip("/")
    parent, _, last = url.rpartition("/")
    which = last if last == BEST_LINK or parse_step(last) is not None else ""
    try:
        result = process.ask(
            "fetch given", parent if which else url, which=which, folder=str(run.fetched_folder)
        )
    except MirrorFailedError as error:
        raise _make_store_error(f"trainer.resume={url}: {error}", error) from None
    folder = run.fetched_folder / result["name"]
    for warning in result["warnings"]:
        report(f"warning: {warning}; {folder.name} is used")
    report(f"fetched {folder.name} from {parent if which else url}")
    trainer = dataclasses.replace(config.trainer, resume=str(folder))
    return dataclasses.replace(config, trainer=trainer)


def _open_mirror(
    config: Config, run: Run, given: str, process: MirrorProcess, report: Callable[[str], None]
) -> SnapshotMirror:
    """Bring what is newer in the mirror to the run's folder, and take the mirror for this start."""
    trainer = config.trainer
    url = f"{str(trainer.mirror).rstrip('/')}/{run.name}"
    owner_file = str(run.mirror_file)
    snapshot, _ = find_newest(run.snapshots_folder)
    is_own_address = f"{given.rstrip('/')}/".startswith(f"{url}/")
    try:
        found = process.ask(
            "fetch newer",
            url,
            owner_file=owner_file,
            snapshots=str(run.snapshots_folder),
            newest_step=None if snapshot is None else snapshot.step,
            is_adopted=(trainer.resume == "auto" or is_own_address)
            and not list_snapshots(run.snapshots_folder),
            is_fetched=trainer.resume in ("auto", "never"),
        )
        _report_fetched(config, run, url, found, report)
        owner = process.ask("take", url, owner_file=owner_file)["owner"]
    except MirrorFailedError as error:
        known = read_claim(run.mirror_file)
        if error.do is not None:
            raise _make_store_error(f"trainer.mirror={trainer.mirror}: {error}", error) from None
        if snapshot is None or known is None:
            what = (
                f"trainer.mirror={trainer.mirror}: {error}; whether it holds snapshots of "
                f"{run.name} is not known"
            )
            raise _make_store_error(what, error) from None
        report(
            f"warning: the mirror {url} does not answer: {error}; resuming from what is here, and "
            "trying it again"
        )
        return SnapshotMirror(process, url, known, trainer.keep_last)
    report(f"snapshots are mirrored to {url}")
    return SnapshotMirror(process, url, owner, trainer.keep_last, found["mirrored_step"])


def _report_fetched(
    config: Config, run: Run, url: str, found: dict[str, Any], report: Callable[[str], None]
) -> None:
    """Say what was fetched. Raise, before the mirror is taken from anybody, if it is of other
    settings."""
    for warning in found["warnings"]:
        report(f"warning: {warning}; an older one is used")
    if found["fetched_step"] is not None:
        report(f"fetched the snapshot of step {found['fetched_step']} from {url}")
        folder = run.snapshots_folder / format_folder_name(found["fetched_step"])
        require_same_settings(run, verify_snapshot(folder).info.get("config", {}), config, folder)


def _make_store_error(what: str, error: MirrorFailedError) -> EchelonError:
    """Return the error of a store that could not be asked: a mistake of the user, or not."""
    if error.do is not None:
        return EchelonError(Fault(what, error.do))
    return EchelonError(Fault(what, "try again when the store answers"), exit=ExitCode.FAILED)


def get_close_limit_s(config: Config, outcome: ExitCode, stopped_s: float) -> float | None:
    """Return how long the end of a run may wait for its mirror: a run that is finished as long as
    bytes move, one that was stopped ``stopped_s`` ago within the time it was given."""
    if outcome is not ExitCode.PREEMPTED:
        return None
    limit_s = make_launcher(config).get_stop_limit_s(config)
    if limit_s is not None:
        return max(1.0, limit_s - QUEUE_MARGIN_S - stopped_s)
    return max(1.0, PREEMPTED_LIMIT_S - stopped_s)
