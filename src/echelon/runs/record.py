"""What the folder of a run says, read so that nothing in it can make a listing fail.

A folder may be half-copied, cut short by a full disk, or written by a later version. What cannot
be read is missing, and a folder without a readable configuration says why it is broken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echelon.config import bundled_experiments
from echelon.runs.create import get_short_subject
from echelon.runs.metrics_file import is_number
from echelon.runs.run_folder import Run
from echelon.runs.status import RunStatus, read_run_statuses
from echelon.utils.os_errors import describe_os_error

_STATES_WITH_BEST = ("finished", "preempted")
"""States that are written together with the best value."""


@dataclass(frozen=True)
class RunRecord:
    """One run as listed and displayed: its configuration, status and what went wrong reading
    them."""

    run: Run
    config: dict[str, Any]
    """As it is in the file: a later version's settings are settings too."""
    status: dict[str, Any]
    run_status: RunStatus
    problem: str
    """Why the folder cannot be read as a run; empty for a sound one."""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def state(self) -> str:
        """The state; `broken` for a folder without a readable configuration."""
        return "broken" if self.problem else self.run_status.state

    @property
    def entry(self) -> str:
        """The entry point of its experiment, or an empty string."""
        return str(self.get_section("experiment").get("entry") or "")

    @property
    def program(self) -> list[str]:
        """The command of `echelon run`; empty for an experiment."""
        words = self.config.get("program")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def experiment(self) -> str:
        """The experiment in a word; with its function where that is not simply `experiment`."""
        if not self.entry and not self.program:
            return "–"
        function = self.entry.rpartition(":")[2]
        plain = function in ("", "experiment") or self.entry in bundled_experiments.list_entries()
        return get_short_subject(self.entry, self.program) + ("" if plain else f":{function}")

    @property
    def best_name(self) -> str:
        """The metric that decides which snapshot is the best."""
        return str(self.get_section("trainer").get("best") or "loss")

    @property
    def best_is(self) -> str:
        return "max" if self.get_section("trainer").get("best_is") == "max" else "min"

    @property
    def best(self) -> float | None:
        """The best evaluated value, if the status holds it."""
        value = self.status.get("best")
        return value if self.status.get("state") in _STATES_WITH_BEST and is_number(value) else None

    @property
    def start_times(self) -> list[float]:
        """When the run was started or resumed, as far as the status knows: the last time, and
        each start of a batch job."""
        jobs = self.status.get("starts")
        noted = jobs if isinstance(jobs, list) else []
        times = [job.get("time") for job in noted if isinstance(job, dict)]
        return [float(t) for t in (*times, self.status.get("since")) if is_number(t)]

    def get_time(self, key: str) -> float | None:
        """Return a time in the status, or None."""
        value = self.status.get(key)
        return value if is_number(value) else None

    def get_count(self, key: str) -> int | None:
        """Return an integer in the status, or None."""
        value = self.status.get(key)
        return int(value) if is_number(value) and isinstance(value, int) else None

    def get_section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration, empty if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}


def read_records(runs: Iterable[Run]) -> tuple[list[RunRecord], str]:
    """Return a record of each run, newest first, and why Slurm did not answer, if it did not."""
    runs_by_folder = {str(run.folder): run for run in runs}
    standings, silence = read_run_statuses(runs_by_folder.values())
    return [_read_record(runs_by_folder[s.folder], s) for s in standings], silence


def _read_record(run: Run, standing: RunStatus) -> RunRecord:
    config, broken = _read_config(run)
    return RunRecord(run, config, run.read_status(), standing, broken)


def _read_config(run: Run) -> tuple[dict[str, Any], str]:
    """Return config.json of any version, and why it cannot be read, if it cannot."""
    try:
        return run.read_config_json(), ""
    except FileNotFoundError:
        return {}, "config.json is missing"
    except OSError as error:
        return {}, f"config.json: {describe_os_error(error)}"
    except (ValueError, RecursionError):
        return {}, "config.json is damaged"
