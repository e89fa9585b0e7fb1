"""Where a run folder comes from, if the run is on a cluster and the folder only a copy of it.

`echelon.login` writes these files: `origin.json` once, when the run is submitted, and `.origin`
with every answer of the login node. All else in the folder is the run's own, as far as it came.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.runs.run_folder import ORIGIN_FILE, Run
from echelon.runs.slurm_queue import SlurmJobState, SlurmQueueAnswer
from echelon.utils.files import read_json_object, write_json_atomically

NOTES_FOLDER = ".login"
"""Beside the runs: what is being submitted at this moment (`echelon.login.submission`)."""


@dataclass(frozen=True)
class RunOrigin:
    """The cluster that a run is on, and how this machine reaches it."""

    host: str
    """The login node, as ssh knows it."""
    ssh: str
    """The command, as `launch.ssh` has it."""
    remote_dir: str
    """The folder of the project there, as it was given."""
    folder: str
    """The run's folder there."""
    python: str | None
    """`launch.python`, if it was given."""
    source: str
    """The folder here whose code was sent."""
    config: dict[str, Any]
    """The configuration as it was composed here, with the paths of this machine."""
    is_command: bool = False
    """Whether it is a command that was submitted (`echelon submit`)."""
    is_sweep: bool = False
    """Whether the folder is that of a sweep, and no run."""
    sweep: str = ""
    """The name of the sweep that the run is a trial of."""

    def write(self, run: Run) -> None:
        """Write it into the run's folder here."""
        # It names the code that `echelon resume` runs.
        write_json_atomically(run.origin_file, {"version": 1, **asdict(self)}, names_code=True)


@dataclass(frozen=True)
class CopyState:
    """How far the copy of a run has come."""

    files: dict[str, list[int]]
    """Size and time of change of every file, as they were there when it was copied."""
    states: dict[str, list[str]]
    """What Slurm said there of the run's job: its state, and why it is pending."""
    asked: float = 0.0
    """When the copy was made, by the clock here."""
    slurm_error: str = ""
    """Why Slurm did not answer there."""
    unreachable: str = ""
    """Why the login node did not answer since then."""
    is_settled: bool = False
    """Whether the run is over and everything that lists need was copied after that."""

    def write(self, run: Run) -> None:
        """Write it into the run's folder here."""
        write_json_atomically(run.origin_state_file, asdict(self))


def read_origin(run: Run) -> RunOrigin | None:
    """Return where a run folder comes from; None for a run of this machine."""
    data = read_json_object(run.origin_file)
    if data is None:
        return None
    data.pop("version", None)
    try:
        return RunOrigin(**data)
    except TypeError:  # of a later version, or damaged
        return None


def read_copy_state(run: Run) -> CopyState:
    """Return how far the copy has come; at its beginning nothing is known."""
    data = read_json_object(run.origin_state_file) or {}
    try:
        return CopyState(**data)
    except TypeError:
        return CopyState({}, {})


def read_slurm_answer(run: Run) -> SlurmQueueAnswer:
    """Return what Slurm last said of the job of such a run."""
    state = read_copy_state(run)
    if not state.states and not state.slurm_error and not state.asked:
        return SlurmQueueAnswer({}, "it was not asked yet")
    states = {job: SlurmJobState(*pair[:2]) for job, pair in state.states.items() if pair}
    return SlurmQueueAnswer(states, state.slurm_error)


def list_changing_copies(root: Path) -> list[Run]:
    """Return the copies in a folder of runs that were not over when they were last brought up to
    date."""
    found = [Run(file.parent.absolute()) for file in sorted(root.glob(f"*/{ORIGIN_FILE}"))]
    runs = [run for run in found if not run.folder.is_symlink()]
    return [run for run in runs if not read_copy_state(run).is_settled]
