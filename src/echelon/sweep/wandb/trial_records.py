"""Records of the trials that our agents ran, one file each in the sweep's folder.

They let a sweep that was interrupted resume its unfinished trials, and `echelon sweep show` report
without asking the server.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from echelon.config.untrusted import WandbTrial, make_wandb_trial
from echelon.errors import EchelonError
from echelon.utils.files import write_json_atomically

DONE_STATES = ("finished", "stopped", "failed")
"""States of trials that have a result and never run again."""


@dataclass(frozen=True)
class WandbTrialRecord:
    """One trial: its parameters, its state and its result. Written as JSON by these names."""

    id: str
    sweep: str
    """ENTITY/PROJECT/SWEEP."""
    parameters: Mapping[str, Any]
    """As the server names and nests them."""
    state: str = "running"
    """running, preempted, or one of DONE_STATES."""
    cause: str = ""
    """Why it failed."""
    value: float | None = None
    """The last value of the sweep's metric."""
    started_at: float = field(default_factory=time.time)
    exit_code: int | None = None

    def to_checked_trial(self) -> WandbTrial:
        """Return the trial with checked parameters; EchelonError if one is not allowed."""
        return make_wandb_trial(self.sweep, self.id, self.parameters)


def write_record(folder: Path, record: WandbTrialRecord) -> None:
    """Write the record into the sweep's folder, if the disk allows it."""
    with contextlib.suppress(OSError):  # a full disk must not end a sweep
        write_json_atomically(_get_record_file(folder, record.id), asdict(record))


def read_trial_records(folder: Path) -> list[WandbTrialRecord]:
    """Return the records of all trials in the order in which they were started."""
    records = []
    for path in folder.glob("trial-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(WandbTrialRecord(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(records, key=lambda record: record.started_at)


def read_unfinished_records(folder: Path) -> list[WandbTrialRecord]:
    """Return the records of trials that an interrupted sweep left without a result."""
    return [r for r in read_trial_records(folder) if r.state not in DONE_STATES and _is_valid(r)]


def _is_valid(record: WandbTrialRecord) -> bool:
    try:
        record.to_checked_trial()
    except EchelonError:
        return False
    return True


def prepare_trial_environment(folder: Path, record: WandbTrialRecord) -> dict[str, str]:
    """Write the file of parameters, and return the variables that name it and the trial.

    They are those that wandb's own agent gives to a trial: wandb.init() reads them, and so does
    config/untrusted.py.
    """
    file = folder / f"trial-{record.id}.yaml"
    entries = {name: {"value": value} for name, value in record.parameters.items()}
    file.write_text(yaml.safe_dump({"wandb_version": 1, **entries}), encoding="utf-8")
    entity, project, sweep = record.sweep.split("/")
    variables = {
        "WANDB_ENTITY": entity,
        "WANDB_PROJECT": project,
        "WANDB_SWEEP_ID": sweep,
        "WANDB_RUN_ID": record.id,
        "WANDB_SWEEP_PARAM_PATH": str(file.absolute()),
    }
    return {name: value for name, value in variables.items() if value}


def get_trial_log_file(folder: Path, trial_id: str) -> Path:
    """Return the log file of a trial's command."""
    return folder / f"trial-{trial_id}.log"


def _get_record_file(folder: Path, trial_id: str) -> Path:
    return folder / f"trial-{trial_id}.json"
