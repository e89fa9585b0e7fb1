"""A sweep's folder, beside those of its trials: every path of it, and what it was started with."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Exit, Fault, suggest_nearest, suggest_other_folder
from echelon.runs.run_folder import Run
from echelon.sweep import located_yaml
from echelon.sweep.sweep_file import SweepFile, SweepMetric, parse_sweep
from echelon.utils.files import write_json_atomically, write_text_atomically
from echelon.utils.os_errors import describe_os_error

_VERSION = 1
_MARKER_FILES = ("sweep.json", "server.json")
"""Of a sweep searched here, of one on wandb's server."""


@dataclass(frozen=True)
class SweepSettings:
    """What all workers of a sweep must agree on, beside its file."""

    words: list[str]
    """Overrides of every trial."""
    program: list[str]
    """Somebody else's program, with wandb's macros in it; else an experiment is trained."""
    metric: dict[str, Any]
    cap: int
    """So many results there will be."""
    seed: int = 0
    storage: str | None = None
    """A database that Optuna knows; default: the journal in the folder."""
    lease_s: float = 30.0
    """A worker of another host that is silent for so long has lost its trial."""
    launcher: str = "inline"
    """Of the trials; with slurm a worker is the batch job in which they are steps."""
    version: int = field(default=_VERSION, kw_only=True)


@dataclass(frozen=True)
class SweepFolder:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def settings_file(self) -> Path:
        return self.folder / "sweep.json"

    @property
    def server_file(self) -> Path:
        return self.folder / "server.json"

    @property
    def file_copy(self) -> Path:
        """Of the file that describes the sweep."""
        return self.folder / "sweep.yml"

    @property
    def journal_file(self) -> Path:
        return self.folder / "journal.log"

    @property
    def lock_file(self) -> Path:
        return self.folder / ".lock"

    def lease_file(self, number: int) -> Path:
        """Who has a trial."""
        return self.folder / "leases" / f"{number}.json"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def worker_log(self, slot: str) -> Path:
        return self.logs / f"worker-{slot}.log"

    @property
    def script_file(self) -> Path:
        return self.folder / "workers.sh"

    @property
    def job_file(self) -> Path:
        return self.folder / "job"

    def find_trial_runs(self) -> list[Run]:
        """All that are called like trials."""
        known = re.compile(re.escape(self.name) + r"-\d+")
        found = self.folder.parent.glob(f"{self.name}-*/config.json")
        return [Run(path.parent) for path in found if known.fullmatch(path.parent.name)]

    def trial_run(self, number: int) -> Run:
        """A trial's: beside the sweep's folder, where all verbs find it."""
        return Run(self.folder.with_name(f"{self.name}-{number}"))

    def read_file(self) -> SweepFile:
        return parse_sweep(located_yaml.load_yaml(self.file_copy))

    def read_settings(self) -> SweepSettings:
        try:
            known = json.loads(self.settings_file.read_text(encoding="utf-8"))
            return SweepSettings(**known)
        except (OSError, ValueError, TypeError) as error:
            raise EchelonError(
                Fault(f"{self.settings_file} cannot be read: {error}", "start another sweep"),
                exit=Exit.NOT_FOUND,
            ) from None

    def read_metric(self) -> SweepMetric:
        return SweepMetric(**self.read_settings().metric)

    def write_files(self, settings: SweepSettings, text: str) -> None:
        try:
            for folder in (self.logs, self.folder / "leases"):
                folder.mkdir(parents=True, exist_ok=True)
            if settings.storage:
                self.folder.chmod(0o700)  # its address may have a password in it
            write_text_atomically(
                self.file_copy, text
            )  # workers of somebody else may be reading it
            write_json_atomically(self.settings_file, asdict(settings))
        except OSError as error:
            raise unwritable_folder_error(self.folder, error) from None


def unwritable_folder_error(folder: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"the sweep's folder {folder} cannot be written: {describe_os_error(error)}",
            suggest_other_folder(error, "--dir PATH"),
        )
    )


def find_sweep(where: str, root: str) -> SweepFolder:
    """By name or path."""
    for folder in (Path(where), Path(root) / where):
        if any((folder / file).exists() for file in _MARKER_FILES):
            return SweepFolder(folder.resolve())
    known = {path.parent.name for file in _MARKER_FILES for path in Path(root).glob(f"*/{file}")}
    raise EchelonError(
        Fault(
            f"no sweep {where!r} here or in {Path(root).absolute()}",
            suggest_nearest(where, known) if known else "start one with `echelon sweep FILE`",
        ),
        exit=Exit.NOT_FOUND,
    )
