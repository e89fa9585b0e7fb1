"""A sweep's folder, beside those of its trials: every path of it, and what it was started with."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Exit, Fault, elsewhere, nearest
from echelon.runs import Run
from echelon.sweep import marked
from echelon.sweep.file import Metric, SweepFile, understood
from echelon.utils.files import write_json_atomically, write_text_atomically
from echelon.utils.os_errors import describe_os_error

_VERSION = 1
_FILES = ("sweep.json", "server.json")
"""Of a sweep searched here, of one on wandb's server."""


@dataclass(frozen=True)
class Settings:
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
class Sweep:
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
    def copy(self) -> Path:
        """Of the file that describes the sweep."""
        return self.folder / "sweep.yml"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.log"

    @property
    def lock(self) -> Path:
        return self.folder / ".lock"

    def lease(self, number: int) -> Path:
        """Who has a trial."""
        return self.folder / "leases" / f"{number}.json"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, slot: str) -> Path:
        return self.logs / f"worker-{slot}.log"

    @property
    def script_file(self) -> Path:
        return self.folder / "workers.sh"

    @property
    def job_file(self) -> Path:
        return self.folder / "job"

    def runs(self) -> list[Run]:
        """All that are called like trials."""
        known = re.compile(re.escape(self.name) + r"-\d+")
        found = self.folder.parent.glob(f"{self.name}-*/config.json")
        return [Run(path.parent) for path in found if known.fullmatch(path.parent.name)]

    def run(self, number: int) -> Run:
        """A trial's: beside the sweep's folder, where all verbs find it."""
        return Run(self.folder.with_name(f"{self.name}-{number}"))

    def file(self) -> SweepFile:
        return understood(marked.load(self.copy))

    def settings(self) -> Settings:
        try:
            known = json.loads(self.settings_file.read_text(encoding="utf-8"))
            return Settings(**known)
        except (OSError, ValueError, TypeError) as error:
            raise EchelonError(
                Fault(f"{self.settings_file} cannot be read: {error}", "start another sweep"),
                exit=Exit.NOT_FOUND,
            ) from None

    def metric(self) -> Metric:
        return Metric(**self.settings().metric)

    def write(self, settings: Settings, text: str) -> None:
        try:
            for folder in (self.logs, self.folder / "leases"):
                folder.mkdir(parents=True, exist_ok=True)
            if settings.storage:
                self.folder.chmod(0o700)  # its address may have a password in it
            write_text_atomically(self.copy, text)  # workers of somebody else may be reading it
            write_json_atomically(self.settings_file, asdict(settings))
        except OSError as error:
            raise not_writable(self.folder, error) from None


def not_writable(folder: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"the sweep's folder {folder} cannot be written: {describe_os_error(error)}",
            elsewhere(error, "--dir PATH"),
        )
    )


def open_sweep(where: str, root: str) -> Sweep:
    """By name or path."""
    for folder in (Path(where), Path(root) / where):
        if any((folder / file).exists() for file in _FILES):
            return Sweep(folder.resolve())
    known = {path.parent.name for file in _FILES for path in Path(root).glob(f"*/{file}")}
    raise EchelonError(
        Fault(
            f"no sweep {where!r} here or in {Path(root).absolute()}",
            nearest(where, known) if known else "start one with `echelon sweep FILE`",
        ),
        exit=Exit.NOT_FOUND,
    )
