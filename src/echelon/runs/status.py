"""The status of runs: by Slurm's queue, then its accounting, then what their folders say."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import ExitCode
from echelon.runs.failure import shorten_to_line
from echelon.runs.metrics_file import is_number
from echelon.runs.origin import read_copy_state, read_slurm_answer
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import (
    WAITING_STATES,
    SlurmJobState,
    SlurmQueueAnswer,
    query_jobs,
)
from echelon.utils.text import format_time_ago

ACTIVE_STATES = ("starting", "queued", "requeued", "running")
_STATES_WITH_BEST = ("finished", "preempted", "pruned")
"""States that are written together with the best value."""
_JOB_ID = re.compile(r"\d+(_\d+)?")
_MAX_TIME_S = 253370764800
"""In seconds since 1970. A larger number in a file is damage: no calendar has such a time."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run as seen from outside, whatever launched it."""

    run: str
    folder: str
    launcher: str | None
    job: str | None
    """Slurm's number."""
    host: str | None
    """Where the process is that holds the run together; None under Slurm."""
    state: str
    note: str
    """One line: why it failed, what it waits for."""
    nodes: int | None
    world: int | None
    started: float
    """When it was typed."""
    exit: int | None = None
    """The training's own, once it is over."""

    @property
    def is_active(self) -> bool:
        """Whether the run is queued or running, or will be again without anybody's action."""
        return self.state in ACTIVE_STATES


def read_run_statuses(runs: Iterable[Run]) -> tuple[list[RunStatus], str]:
    """Return the status of all runs, newest first, and why Slurm did not answer, if it did not."""
    return derive_statuses([FolderFacts.read(run) for run in runs])


def read_run_status(run: Run) -> RunStatus:
    """Return the status of one run."""
    [status], _ = read_run_statuses([run])
    return status


def derive_statuses(
    facts: Sequence[FolderFacts],
    ask_slurm: Callable[[Sequence[str]], SlurmQueueAnswer] = query_jobs,
) -> tuple[list[RunStatus], str]:
    """Return the status of all runs by what their folders say, newest first, and why Slurm did not
    answer, if it did not.

    Slurm is asked at most twice, whatever the number of runs: its queue, and its accounting for
    jobs that have left the queue. Of a run on a cluster that is reached by its login node, the
    folder says what Slurm answered there (`runs.origin`). ``ask_slurm`` is for callers that have
    asked it already.
    """
    unfinished_jobs = [f.job for f in facts if f.job and f.exit_code is None and not f.is_copy]
    answer = ask_slurm(unfinished_jobs)
    active_jobs = {job for job, state in answer.states.items() if state.is_active}
    # A job that ended while Slurm was asked wrote its exit code after its folder was read.
    ended_jobs = set() if answer.error else set(unfinished_jobs) - active_jobs
    facts = [FolderFacts.read(f.run) if f.job in ended_jobs and not f.is_copy else f for f in facts]
    statuses = [_derive_status(f, read_slurm_answer(f.run) if f.is_copy else answer) for f in facts]
    return sorted(statuses, key=lambda s: s.started, reverse=True), answer.error


# --- one run ---


@dataclass(frozen=True)
class FolderFacts:
    """What the status files of a run folder say, read once. A file that is missing, half-written or
    nonsense says nothing."""

    run: Run
    status: dict[str, Any]
    exit_code: int | None
    """Written by the batch script as its last act."""
    is_cancelled: bool
    is_copy: bool = False
    """Whether the run is on a cluster whose jobs this machine's Slurm, if any, does not know."""

    @classmethod
    def read(cls, run: Run) -> FolderFacts:
        """Read the small files of a run, without asking Slurm or the kernel. It never raises: a
        missing or damaged file leaves its fact empty."""
        code = None
        with contextlib.suppress(OSError, ValueError):
            code = int(run.exit_code_file.read_text(encoding="utf-8"))
        return cls(
            run,
            run.read_status_file(),
            code,
            run.cancel_file.exists(),
            run.origin_file.exists(),
        )

    @property
    def recorded_state(self) -> str | None:
        """The state that the run itself last wrote."""
        return self._get_text("state")

    @property
    def launcher(self) -> str | None:
        return self._get_text("launcher")

    @property
    def job(self) -> str | None:
        """Slurm's id of the job, if Slurm runs it."""
        if self.launcher != "slurm":
            return None
        job = str(self.status.get("job") or self.run.read_job_id())
        return job if _JOB_ID.fullmatch(job) else None

    @property
    def process(self) -> dict[str, Any]:
        return self._get_mapping("process")

    @property
    def failure(self) -> dict[str, Any]:
        return self._get_mapping("failure")

    @property
    def started(self) -> float:
        """When the run was started; if the status does not have it, when its configuration was
        written."""
        started = self.status.get("started")
        if isinstance(started, (int, float)) and abs(started) < _MAX_TIME_S:
            return float(started)
        with contextlib.suppress(OSError):
            return self.run.config_file.stat().st_mtime
        return 0.0

    @property
    def step(self) -> int | None:
        """The last step that the status knows."""
        return self.get_int("step")

    @property
    def total_steps(self) -> int | None:
        return self.get_int("total_steps")

    @property
    def has_trained(self) -> bool:
        """Whether a step was made, as far as the folder says."""
        if self.status.get("trained") is True or (self.step or 0) > 0:
            return True
        with contextlib.suppress(OSError):
            if self.run.metrics_file.stat().st_size > 0:
                return True
        return self.run.has_snapshots()

    @property
    def best(self) -> float | None:
        """The best evaluated value, if the status holds it."""
        return self.get_number("best") if self.recorded_state in _STATES_WITH_BEST else None

    def get_int(self, key: str) -> int | None:
        """Return an integer in the status, or None."""
        value = self.get_number(key)
        return value if isinstance(value, int) else None

    def get_number(self, key: str) -> float | None:
        """Return a number in the status, or None."""
        value = self.status.get(key)
        return value if is_number(value) else None

    def _get_text(self, key: str) -> str | None:
        value = self.status.get(key)
        return value if isinstance(value, str) else None

    def _get_mapping(self, key: str) -> dict[str, Any]:
        value = self.status.get(key)
        return value if isinstance(value, dict) else {}


def _derive_status(facts: FolderFacts, answer: SlurmQueueAnswer) -> RunStatus:
    state, note = _derive_from_job(facts, answer) if facts.job else _derive_from_process(facts)
    host = facts.process.get("host")
    if facts.is_copy and state in ACTIVE_STATES:
        note = "; ".join(filter(None, [note, describe_copy_age(facts.run)]))
    return RunStatus(
        run=facts.run.name,
        folder=str(facts.run.folder),
        launcher=facts.launcher,
        job=facts.job,
        host=host if isinstance(host, str) and not facts.job else None,
        state=state,
        note=note,
        nodes=facts.get_int("nodes"),
        world=facts.get_int("world"),
        started=facts.started,
        exit=None if state in ACTIVE_STATES else _derive_exit_code(facts, state),
    )


def describe_copy_age(run: Run) -> str:
    """Return how old the copy of a run on a cluster is, if its login node did not answer since
    then; else an empty string."""
    state = read_copy_state(run)
    if not state.unreachable:
        return ""
    since = f"as of {format_time_ago(state.asked)}" if state.asked else "nothing was heard of it"
    return f"{since}: {state.unreachable}"


def _derive_from_job(facts: FolderFacts, answer: SlurmQueueAnswer) -> tuple[str, str]:
    """Return state and note of a run with a Slurm job.

    The batch script's exit code decides. Before it is there, Slurm's queue does, then what the run
    itself wrote, then Slurm's accounting.
    """
    if facts.exit_code is not None and (ended := _derive_from_folder(facts)):
        return ended
    job = answer.states.get(str(facts.job))
    if job is None and answer.error:
        # Without a note: that Slurm does not answer is printed once, for all runs.
        return facts.recorded_state or "unknown", ""
    if job is not None and job.is_active:
        return _derive_from_queue(facts, job)
    if facts.recorded_state == "finished":
        return "finished", ""
    if facts.is_cancelled or (job is not None and job.state == "CANCELLED"):
        return "cancelled", _CANCEL_NOTES.get(job.reason, "") if job is not None else ""
    recorded = _derive_from_folder(facts)
    ending = _SLURM_ENDINGS.get(job.state) if job is not None else None
    gone = f"job {facts.job} left the queue before its script came to its end"
    if job is not None and job.state == "FAILED":
        # A script that TERM ended says less than its ranks did.
        return recorded or _SLURM_ENDINGS["FAILED"]
    return ending or recorded or ("lost", gone)


def _derive_from_queue(facts: FolderFacts, job: SlurmJobState) -> tuple[str, str]:
    """Return state and note of a job that is in the queue."""
    if job.state in WAITING_STATES:
        return "requeued" if facts.status.get("starts") else "queued", job.reason
    return "running", "asked to end" if facts.is_cancelled else ""


_SLURM_ENDINGS = {
    "TIMEOUT": ("failed", "out of time before it could save; see launch.signal_lead_s"),
    "OUT_OF_MEMORY": ("failed", "out of memory; see launch.sbatch=['--mem=…']"),
    "NODE_FAIL": ("lost", "a node went down"),
    "BOOT_FAIL": ("lost", "a node did not boot"),
    "PREEMPTED": ("preempted", ""),
    "DEADLINE": ("failed", "past its deadline"),
    "FAILED": ("failed", "its batch script was killed"),
}
"""Of jobs that recorded no end of their own."""


_CANCEL_NOTES = {
    "DependencyNeverSatisfied": "by Slurm: what it waited for did not end well (launch.after)"
}
"""Why Slurm itself has cancelled a job, by the reason that its queue shows."""


def _derive_from_process(facts: FolderFacts) -> tuple[str, str]:
    """Return state and note of a run without a job: alive, ended, or gone without a recorded
    end."""
    if ended := _derive_from_folder(facts):
        return ended
    if facts.recorded_state is None:
        return "unknown", "its status.json is missing or damaged"
    if facts.launcher == "slurm":
        return facts.recorded_state, "it has no job number yet"
    alive = is_alive(facts.process)
    if alive is False:
        if facts.is_cancelled:
            return "cancelled", ""
        return "lost", f"process {facts.process.get('pid')} is gone without a word"
    if not facts.process:
        return "unknown", f"{facts.recorded_state}, by an older version, which did not say where"
    return facts.recorded_state, "asked to end" if facts.is_cancelled else ""


def _derive_from_folder(facts: FolderFacts) -> tuple[str, str] | None:
    """Return how a run ended by its own files; None while it has not."""
    state, code = facts.recorded_state, facts.exit_code
    if state == "pruned":  # written by the sweep's worker, after the run's own last word
        return "pruned", ""
    if code == ExitCode.OK or (code is None and state == "finished"):
        return "finished", ""
    if code is None and state not in ("preempted", "failed", "not submitted"):
        return None
    if facts.is_cancelled:
        return "cancelled", ""
    if code == ExitCode.PREEMPTED or (code is None and state == "preempted"):
        return "preempted", ""
    if state == "not submitted":
        return "failed", "Slurm did not take the job"
    return "failed", _describe_failure(facts)


def _describe_failure(facts: FolderFacts) -> str:
    """Return one line on why a run failed: its first failure, or where to look."""
    if failure := facts.failure:
        return f"rank {failure.get('rank')}: {shorten_to_line(str(failure.get('summary', '')))}"
    code = "" if facts.exit_code is None else f"exit code {facts.exit_code}; "
    return f"{code}see `echelon logs {facts.run.name}`"


def _derive_exit_code(facts: FolderFacts, state: str) -> int:
    """Return the exit code of the training, which `attach` and `--wait` pass on."""
    if facts.exit_code is not None:
        return facts.exit_code
    if state in ("finished", "preempted", "pruned", "cancelled"):
        return ExitCode.OK if state == "finished" else ExitCode.PREEMPTED
    code = facts.failure.get("exit")
    return code if isinstance(code, int) and code else ExitCode.FAILED
