"""What became of the trials, a file each, so that a sweep that was broken off can go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echelon.config.untrusted import WandbTrial, make_trial
from echelon.errors import EchelonError
from echelon.utils.files import write_json_atomically

DONE_STATES = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class WandbTrialRecord:
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

    def to_trial(self) -> WandbTrial:
        return make_trial(self.sweep, self.id, self.given)


def write_record(folder: Path, record: WandbTrialRecord) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end a sweep
        write_json_atomically(_record_file(folder, record.id), asdict(record))


def read_records(folder: Path) -> list[WandbTrialRecord]:
    """In the order in which they were begun."""
    found = []
    for path in folder.glob("trial-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(WandbTrialRecord(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda told: told.begun)


def read_unfinished(folder: Path) -> list[WandbTrialRecord]:
    """What a broken-off sweep left, whose parameters are still to be had."""
    left = [told for told in read_records(folder) if told.state not in DONE_STATES]
    return [told for told in left if _is_valid(told)]


def _is_valid(record: WandbTrialRecord) -> bool:
    try:
        record.to_trial()
    except EchelonError:
        return False
    return True


def log_file(folder: Path, id: str) -> Path:
    """What the command of a trial said."""
    return folder / f"trial-{id}.log"


def parameter_file(folder: Path, id: str) -> Path:
    """As wandb's own agent would write it."""
    return folder / f"trial-{id}.yaml"


def _record_file(folder: Path, id: str) -> Path:
    return folder / f"trial-{id}.json"
