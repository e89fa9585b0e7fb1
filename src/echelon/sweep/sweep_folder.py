"""The folder of a sweep: its paths, its settings and its lock.

It is beside the folders of its trials, which are runs named SWEEP-NUMBER. Workers on many hosts
share this folder and nothing else, so it must be on a file system whose locks work between hosts.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest, suggest_other_folder
from echelon.runs.run_folder import Run
from echelon.runs.trusted_code import require_trusted_file, require_trusted_folder
from echelon.sweep.sweep_file import SweepFile, SweepMetric, read_sweep_file
from echelon.utils.files import write_json_atomically, write_text_atomically
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason

_VERSION = 1
_MARKER_FILES = ("sweep.json", "server.json")
"""Of a sweep that is searched here, and of one on wandb's server."""


@dataclass(frozen=True)
class SweepSettings:
    """What all workers of a sweep must agree on, beside its file. Serialised by these names."""

    overrides: list[str]
    """Overrides of every trial."""
    program: list[str]
    """The command of another program, with wandb's macros; empty: an experiment is trained."""
    metric: dict[str, Any]
    run_cap: int
    """The number of trials."""
    seed: int = 0
    storage: str | None = None
    """The URL of a database for Optuna; None: the journal in the folder."""
    lease_s: float = 30.0
    """A worker of another host that sends no heartbeat for so long loses its trial."""
    launcher: str = "inline"
    """Of the trials. With slurm a worker is a batch job, and its trials are steps of it."""
    version: int = field(default=_VERSION, kw_only=True)


@dataclass(frozen=True)
class SweepFolder:
    """Every path of a sweep, and access to what its files hold."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def settings_file(self) -> Path:
        """The settings of a sweep that is searched here: `SweepSettings` as JSON."""
        return self.folder / "sweep.json"

    @property
    def server_file(self) -> Path:
        """The id of a sweep on wandb's server. A sweep has this file or `settings_file`."""
        return self.folder / "server.json"

    @property
    def file_copy(self) -> Path:
        """The copy of the file that describes the sweep."""
        return self.folder / "sweep.yml"

    @property
    def journal_file(self) -> Path:
        """Optuna's journal of all trials. It is written only under the lock."""
        return self.folder / "journal.log"

    @property
    def news_file(self) -> Path:
        """Which messages about the sweep were sent. See `notify.record`."""
        return self.folder / "news.jsonl"

    @property
    def lock_file(self) -> Path:
        """The lock that every change of trials and leases is made under. It is never deleted: a
        worker that waits for it would then hold the lock of a file that has gone."""
        return self.folder / ".lock"

    def get_lease_file(self, number: int) -> Path:
        """Return the file that says which worker has a trial: see trial_lease.py."""
        return self.folder / "leases" / f"{number}.json"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def get_worker_log_file(self, slot: str) -> Path:
        return self.logs / f"worker-{slot}.log"

    @property
    def script_file(self) -> Path:
        """The batch script that runs the workers as a Slurm job array."""
        return self.folder / "workers.sh"

    @property
    def job_file(self) -> Path:
        """The id of the Slurm job of the workers."""
        return self.folder / "job"

    def find_trial_runs(self) -> list[Run]:
        """Return all runs that have the name of a trial."""
        pattern = re.compile(re.escape(self.name) + r"-\d+")
        paths = self.folder.parent.glob(f"{self.name}-*/config.json")
        return [Run(path.parent) for path in paths if pattern.fullmatch(path.parent.name)]

    def get_trial_run(self, number: int) -> Run:
        """Return the run of a trial: beside the sweep's folder, where all commands find it."""
        return Run(self.folder.with_name(f"{self.name}-{number}"))

    def read_file(self) -> SweepFile:
        """Read the copy of the sweep's file."""
        return read_sweep_file(self.file_copy)

    def read_settings(self) -> SweepSettings:
        """Read the settings; EchelonError if they are missing or of another version."""
        try:
            return SweepSettings(**json.loads(self.settings_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise EchelonError(
                Fault(f"{self.settings_file} cannot be read: {error}", "start another sweep"),
                exit=ExitCode.NOT_FOUND,
            ) from None

    def require_trusted_files(self) -> None:
        """Raise EchelonError if somebody else can have written which program a trial runs."""
        for file in (self.settings_file, self.file_copy):
            require_trusted_file(file)

    def read_metric(self) -> SweepMetric:
        """Read the metric from the settings: the file may leave it to the trainer."""
        return SweepMetric(**self.read_settings().metric)

    def write_files(self, settings: SweepSettings, text: str) -> None:
        """Make the folder with the settings and a copy of the file, whose text is `text`."""
        require_trusted_folder(self.folder)
        try:
            for folder in (self.logs, self.folder / "leases"):
                folder.mkdir(parents=True, exist_ok=True)
            if settings.storage:
                self.folder.chmod(0o700)  # its address may have a password in it
            # By a rename, as workers may be reading them.
            write_text_atomically(self.file_copy, text, names_code=True)
            write_json_atomically(self.settings_file, asdict(settings), names_code=True)
        except OSError as error:
            raise make_unwritable_folder_error(self.folder, error) from None


class SweepLock:
    """A FileLock whose failures are faults. Its holder may take it again."""

    def __init__(self, path: Path, busy_message: str = "") -> None:
        """With ``busy_message``, who comes second is refused with it instead of waiting."""
        self._lock = FileLock(path)
        self._busy_message = busy_message

    def __enter__(self) -> None:
        try:
            if not self._busy_message:
                self._lock.acquire()
            elif not self._lock.try_acquire():
                raise EchelonError(Fault(self._busy_message, "wait for its end, or stop it"))
        except LocksUnsupportedError as error:
            folder, reason = self._lock.path.parent, format_os_error_reason(error)
            raise EchelonError(
                Fault(
                    f"{folder} is on a file system without locks: {reason}",
                    "give another place with --dir PATH (Lustre has locks when mounted with "
                    "-o flock)",
                )
            ) from None

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


def make_unwritable_folder_error(folder: Path, error: OSError) -> EchelonError:
    """Return the fault of a sweep's folder that cannot be written."""
    return EchelonError(
        Fault(
            f"the sweep's folder {folder} cannot be written: {format_os_error_reason(error)}",
            suggest_other_folder(error, "--dir PATH"),
        )
    )


def find_sweep(where: str, root: str) -> SweepFolder:
    """Find a sweep by its name in the folder of all runs, or by its path."""
    for folder in (Path(where), Path(root) / where):
        if any((folder / file).exists() for file in _MARKER_FILES):
            return SweepFolder(folder.resolve())
    known = {path.parent.name for file in _MARKER_FILES for path in Path(root).glob(f"*/{file}")}
    raise EchelonError(
        Fault(
            f"no sweep {where!r} here or in {Path(root).absolute()}",
            suggest_nearest(where, known) if known else "start one with `echelon sweep FILE`",
        ),
        exit=ExitCode.NOT_FOUND,
    )
