"""What became of the trials, a file each, so that a sweep that was broken off can go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.config.outside import Trial, trial
from echelon.errors import EchelonError
from echelon.utils.files import write_json_atomically

DONE = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class Told:
    """One trial, as it stands."""

    id: str
    sweep: str
    given: Mapping[str, Any]
    state: str = "running"
    """running, preempted, or one of DONE."""
    cause: str = ""
    """Why it failed."""
    value: float | None = None
    """Of the sweep's metric, the last one."""
    begun: float = field(default_factory=time.time)

    def trial(self) -> Trial:
        return trial(self.sweep, self.id, self.given)


def keep(folder: Path, told: Told) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end a sweep
        write_json_atomically(_file(folder, told.id), asdict(told))


def read(folder: Path) -> list[Told]:
    """In the order in which they were begun."""
    found = []
    for path in folder.glob("trial-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Told(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda told: told.begun)


def unfinished(folder: Path) -> list[Told]:
    """What a broken-off sweep left, whose parameters are still to be had."""
    left = [told for told in read(folder) if told.state not in DONE]
    return [told for told in left if _is_sound(told)]


def _is_sound(told: Told) -> bool:
    try:
        told.trial()
    except EchelonError:
        return False
    return True


def log_file(folder: Path, id: str) -> Path:
    """What the command of a trial said."""
    return folder / f"trial-{id}.log"


def parameter_file(folder: Path, id: str) -> Path:
    """As wandb's own agent would write it."""
    return folder / f"trial-{id}.yaml"


def _file(folder: Path, id: str) -> Path:
    return folder / f"trial-{id}.json"
