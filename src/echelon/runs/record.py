"""What the folder of a run says, read so that nothing in it can make a listing fail.

A folder may be half-copied, cut short by a full disk, or written by a later version. What cannot
be read is missing, and a folder without a readable configuration says why it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from echelon.config import bundled_experiments
from echelon.runs.create import get_short_subject
from echelon.runs.metric_direction import guess_best_is
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import SlurmQueueAnswer, query_jobs
from echelon.runs.status import FolderFacts, RunStatus, derive_statuses
from echelon.utils.os_errors import format_os_error_reason

_UNHAPPY_ENDS = ("failed", "lost", "cancelled")


@dataclass(frozen=True)
class RunRecord:
    """One run as `runs`, `jobs`, `show` and `plot` see it: its configuration, its status, and what
    went wrong reading them. `runs.curves` adds its metrics."""

    facts: FolderFacts
    """What the folder says of the run's status."""
    run_status: RunStatus

    @cached_property
    def _config_or_problem(self) -> tuple[dict[str, Any], str]:
        # Read when it is asked for: `echelon jobs` needs it of no run.
        return _read_config(self.run)

    @property
    def run(self) -> Run:
        return self.facts.run

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it is in the file: a later version's settings are settings too."""
        return self._config_or_problem[0]

    @property
    def problem(self) -> str:
        """Why the folder cannot be read as a run; empty for a sound one."""
        return self._config_or_problem[1]

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def state(self) -> str:
        """The state; `broken` for a folder without a readable configuration."""
        return "broken" if self.problem else self.run_status.state

    @property
    def has_trained(self) -> bool:
        """Whether a step was made. A program, and a submitted command that trains, counts from its
        start: what else it does is not known."""
        is_program = bool(self.program_argv) or self.run.command_file.exists()
        return is_program or self.facts.has_trained

    @property
    def ended_before_step_1(self) -> bool:
        """Whether the run is over and holds nothing: it failed, was lost or cancelled before its
        first step."""
        return self.state in _UNHAPPY_ENDS and not self.has_trained

    @property
    def is_archived(self) -> bool:
        return self.run.archive_file.exists()

    @property
    def entry_point(self) -> str:
        """The entry point of its experiment, or an empty string."""
        return str(self.get_section("experiment").get("entry") or "")

    @property
    def program_argv(self) -> list[str]:
        """The command of `echelon run`; empty for an experiment."""
        words = self.config.get("program")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def experiment(self) -> str:
        """The experiment in a word; with its function where that is not simply `experiment`."""
        if not self.entry_point and not self.program_argv:
            return "–"
        function = self.entry_point.rpartition(":")[2]
        plain = (
            function in ("", "experiment")
            or self.entry_point in bundled_experiments.read_names_by_entry()
        )
        return get_short_subject(self.entry_point, self.program_argv) + (
            "" if plain else f":{function}"
        )

    @cached_property
    def best_name(self) -> str:
        """The metric that decides which snapshot is the best."""
        return str(self.get_section("trainer").get("best") or "loss")

    @cached_property
    def best_is(self) -> str:
        """Whether the best value is the largest ("max") or the smallest ("min"): as it was set, as
        the run found it, or by the metric's name."""
        found = (self.get_section("trainer").get("best_is"), self.facts.status.get("best_is"))
        known = (value for value in found if value in ("min", "max"))
        return next(known, None) or guess_best_is(self.best_name) or "min"

    def get_section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration, empty if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}


def read_run_records(
    runs: Iterable[Run], ask_slurm: Callable[[Sequence[str]], SlurmQueueAnswer] = query_jobs
) -> tuple[list[RunRecord], str]:
    """Return a record of each run, newest first, and why Slurm did not answer, if it did not."""
    facts = {str(run.folder): FolderFacts.read(run) for run in runs}
    statuses, silence = derive_statuses(list(facts.values()), ask_slurm)
    return [RunRecord(facts[status.folder], status) for status in statuses], silence


def _read_config(run: Run) -> tuple[dict[str, Any], str]:
    """Return config.json of any version, and why it cannot be read, if it cannot."""
    try:
        return run.read_config_json(), ""
    except FileNotFoundError:
        return {}, "config.json is missing"
    except OSError as error:
        return {}, f"config.json: {format_os_error_reason(error)}"
    except (ValueError, RecursionError):
        return {}, "config.json is damaged"
