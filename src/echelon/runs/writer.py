"""Who writes into a run folder: one process with its ranks, or one Slurm job, and nobody beside it.

Two trainings in one folder would write over each other's snapshots, metrics and status. So the
process that holds a run together claims its folder before it changes anything in it: rank 0 of
launch=inline, the agent of node 0 (local, env, slurm), the command of launch=ssh. A claim is three
things, each for what the others cannot see:

1. A lock of the kernel on the file ``.writer``. It ends with the process, however that ends.
2. A record in that file: process, host and job, for the messages of others; and beats, its time of
   change, for machines that do not share locks with the writer's.
3. Slurm's queue, for a job that waits for its nodes, when no process exists yet.

A process that was started by the writer (a program of `echelon run` that trains into the run it is
part of) and a later start of the same job share the claim.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.runs.process_record import identify_this_process, is_alive
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import query_queue, read_current_job_id
from echelon.runs.status import FolderFacts
from echelon.utils.files import read_json_object
from echelon.utils.locks import FileLock, LocksUnsupportedError, is_locked
from echelon.utils.processes import list_ancestors

_PATIENCE_S = 1.0
"""How long to try again: a lock is held for an instant by those who ask whether it is held, and
for a moment by a process that was killed just now."""
_POLL_S = 0.05
_BEAT_S = 2.0
_WATCH_S = 10.0
"""How long to watch for a beat of a writer on another machine."""


@dataclass(frozen=True)
class RunWriter:
    """Whoever writes into a run folder: a process, or a job of Slurm's."""

    process: Mapping[str, Any]
    """As identify_this_process() returns it; empty if it is not known."""
    job: str = ""
    """Slurm's id of a job that is queued or running."""

    def __str__(self) -> str:
        if self.job:
            return f"job {self.job}"
        if not self.process:
            return "another process"
        return f"process {self.process.get('pid')} on {self.process.get('host')}"


def find_writer(run: Run) -> RunWriter | None:
    """Return who writes into the folder beside this process; None if nobody does.

    It answers within a moment, so it does not see a writer on a machine that shares no locks with
    this one. Raises an EchelonError if the run is a Slurm job and Slurm does not answer.
    """
    _try_patiently(lambda: find_writing_process(run) is None)
    return find_writing_process(run) or _find_job(run)


def find_writing_process(run: Run) -> RunWriter | None:
    """Return the process that has claimed the folder, by its lock; None if it is this one, or one
    that this one may share the folder with."""
    if str(run.folder) in _claims or not is_locked(run.writer_file):
        return None
    record = _read_record(run)
    return None if _is_shared(record) else RunWriter(_get_process(record))


def make_writer_error(run: Run, writer: RunWriter) -> EchelonError:
    """Return the error for a start of a run that somebody else writes."""
    is_default = run.folder.parent == Path("runs").absolute()
    argument = run.name if is_default else run.folder
    state = "queued or running" if writer.job else "running"
    return EchelonError(
        Fault(
            f"run {run.name} is {state} already, as {writer}",
            f"choose another run.name, follow it with `echelon attach {argument}`, or end it "
            f"with `echelon cancel {argument}`",
        )
    )


# --- the claims of this process ---


def claim_run_folder(run: Run, *, shares_with_command: bool = False) -> None:
    """Make this process the one that writes into the folder, until it ends or releases it.

    Raises an EchelonError that names whoever else writes into it. With ``shares_with_command`` the
    process that the run's status names may hold the folder: the agents of launch=ssh are started
    by a command that does, and which is no parent of theirs.
    """
    key = str(run.folder)
    if (claim := _claims.get(key)) is not None:
        if claim.is_current():
            return
        release_run_folder(run)
    lock, record = FileLock(run.writer_file), _read_record(run)
    try:
        if not _try_patiently(lock.try_acquire):
            _require_shared(run, shares_with_command)
            return
    except LocksUnsupportedError:
        if is_alive(_get_process(record)) and not _is_shared(record):
            raise make_writer_error(run, RunWriter(_get_process(record))) from None
    claim = _FolderClaim(run, lock)
    try:
        if other := _find_job(run) or _find_writer_elsewhere(run, record):
            raise make_writer_error(run, other)
    except BaseException:
        claim.close()
        raise
    _claims[key] = claim
    claim.write_record()


def release_run_folder(run: Run) -> None:
    """End the claim of this process, if it has one: the run is over, or somebody else's now."""
    if (claim := _claims.pop(str(run.folder), None)) is not None:
        claim.release()


def start_writer_beats(run: Run) -> None:
    """Let other machines see that the claim of this process is alive, where they do not share
    locks with this one. It starts a thread, so whatever has to be forked is forked before."""
    if (claim := _claims.get(str(run.folder))) is not None:
        claim.start_beats()


class _FolderClaim:
    """What this process holds of one folder."""

    def __init__(self, run: Run, lock: FileLock) -> None:
        self._run, self._lock = run, lock
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None

    def is_current(self) -> bool:
        """Return whether the file that was locked is still that of the folder, which may have been
        moved aside since."""
        return not self._lock.is_held or self._lock.is_current()

    def write_record(self) -> None:
        """Write who holds the folder. Without room on the disk the lock alone has to do."""
        record = {
            "process": identify_this_process(),
            "job": read_current_job_id(os.environ),
            "attempts": _read_attempts(os.environ),
        }
        with contextlib.suppress(OSError):
            self._run.writer_file.write_text(json.dumps(record), encoding="utf-8")

    def start_beats(self) -> None:
        """Start to beat, unless it beats already."""
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="echelon-writer", daemon=True)
            self._beats.start()

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._run.writer_file)

    def release(self) -> None:
        """End the claim. An empty record says that it ended in order."""
        self._stop.set()
        if self._beats is not None:
            self._beats.join()
        if self.is_current():
            with contextlib.suppress(OSError):
                self._run.writer_file.write_bytes(b"")
        self.close()

    def close(self) -> None:
        """Let go of the lock, and leave the record as it is."""
        if self._lock.is_held:
            self._lock.release()


_claims: dict[str, _FolderClaim] = {}
"""By folder. A table of the process, as the kernel's locks are: whatever part of it creates a run
claims the folder, and another part may do so again."""


def _leave_claims_to_parent() -> None:
    """In a forked child: close its copies of the locks. A loader's process that outlives a killed
    rank for some seconds would otherwise keep the run from being resumed."""
    for claim in _claims.values():
        claim.close()
    _claims.clear()


os.register_at_fork(after_in_child=_leave_claims_to_parent)


def _try_patiently(is_done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# --- whose claim it is ---


def _require_shared(run: Run, shares_with_command: bool) -> None:
    """Raise unless this process may write beside the one that holds the lock."""
    record = _read_record(run)
    process = _get_process(record)
    if _is_shared(record):
        return
    if shares_with_command and process and process == run.read_status_file().get("process"):
        return
    raise make_writer_error(run, RunWriter(process))


def _is_shared(record: Mapping[str, Any]) -> bool:
    """Return whether this process was started by the writer, or is a later start of its job.

    The lock of a node that was lost may stay for a minute, while the file server waits for it. The
    job that is queued again meanwhile goes on with its run.
    """
    process = _get_process(record)
    alive = is_alive(process)
    if alive and process["pid"] in list_ancestors(os.getpid()):
        return True
    recorded = record.get("attempts")
    earlier = recorded if isinstance(recorded, dict) else {}
    mine = _read_attempts(os.environ)
    return not alive and any(earlier.get(job, count) < count for job, count in mine.items())


def _read_attempts(env: Mapping[str, str]) -> dict[str, int]:
    """Return how often what started this process was started before, by its id. The id that
    torchrun has when it is given none is nobody's."""
    ids = {
        "slurm": (read_current_job_id(env), env.get("SLURM_RESTART_COUNT")),
        "torchrun": (env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_RESTART_COUNT")),
    }
    return {
        f"{name} {job}": int(count) if count and count.isdecimal() else 0
        for name, (job, count) in ids.items()
        if job and job != "none"
    }


def _find_job(run: Run) -> RunWriter | None:
    """Return the job of the run if it is queued or running, unless this process is part of it.

    A trial's job is that of a worker, which has others to run: its lease says who runs the trial.
    """
    facts = FolderFacts.read(run)
    job = facts.job
    if not job or facts.exit_code is not None or facts.status.get("in_sweep"):
        return None
    if job in (read_current_job_id(os.environ), os.environ.get("SLURM_JOB_ID")):
        return None
    answer = query_queue([job])
    if answer.error:
        raise EchelonError(
            Fault(
                f"run {run.name} is job {job}, and Slurm does not say whether that is over: "
                f"{answer.error}",
                "type it where Slurm answers, or choose another run.name",
            )
        )
    state = answer.states.get(job)
    return RunWriter({}, job) if state is not None and state.is_active else None


def _find_writer_elsewhere(run: Run, record: Mapping[str, Any]) -> RunWriter | None:
    """Return the writer on another machine whose lock is not seen here, if it beats.

    A process of a job that has left the queue is not looked for. Beats are timed by the clock of
    this machine alone.
    """
    process = _get_process(record)
    is_elsewhere = bool(process) and process.get("host") != socket.gethostname()
    if not is_elsewhere or _is_shared(record) or _is_job_over(record.get("job")):
        return None
    writer, first_beat = RunWriter(process), _read_beat(run)
    print(f"looking whether {writer} still writes into {run.folder}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if _read_beat(run) != first_beat:
            return writer
    return None


def _is_job_over(job: object) -> bool:
    """Return whether Slurm has no such job in its queue; False also without a job or an answer."""
    if not isinstance(job, str):
        return False
    answer = query_queue([job])
    state = answer.states.get(job)
    return not answer.error and not (state is not None and state.is_active)


def _read_beat(run: Run) -> int:
    """Return when the file of the writer was changed. It is opened, because NFS asks its server
    then, and answers from memory otherwise."""
    try:
        with run.writer_file.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _read_record(run: Run) -> dict[str, Any]:
    """Return what the last writer wrote about itself; empty if it has released the folder."""
    return read_json_object(run.writer_file) or {}


def _get_process(record: Mapping[str, Any]) -> dict[str, Any]:
    process = record.get("process")
    return process if isinstance(process, dict) else {}
