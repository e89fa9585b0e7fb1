"""Asking for an allocation, waiting for it, and a shell in it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.interactive.allocation import (
    AllocationFolder,
    compute_cost,
    render_job_script,
    render_shell_script,
)
from echelon.interactive.queue import QueuedAllocation, find_allocation
from echelon.launch.slurm.sbatch import require_slurm_accepts, submit_job
from echelon.utils.locks import FileLock, LocksUnsupportedError

_FILE_POLL_S = 0.2
_QUEUE_POLL_S = 10.0
"""The controller is asked no oftener, whatever is waited for."""


def find_or_request(config: Config | None, files: AllocationFolder, idle_s: float) -> str:
    """Return the job of the allocation of this name: the one that is there, or a new one. Without a
    configuration there has to be one."""
    files.folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(files.folder.parent / f".{files.name}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(LocksUnsupportedError):
            stack.enter_context(lock)  # two at once are to find one job
        if (found := find_allocation(files.name)) is not None:
            print(_describe_found(found), file=sys.stderr)
            return found.job
        if config is None:
            raise EchelonError(
                Fault(
                    f"there is no allocation {files.name!r} to come back to",
                    "ask for one: echelon dev launch=slurm launch.gpus_per_node=1",
                )
            )
        return _request(config, files, idle_s)


def _describe_found(found: QueuedAllocation) -> str:
    where = f"on {found.nodes}, {found.time_left} left" if found.nodes else found.state.lower()
    return f"job {found.job} is there already ({where}); its settings stay as they are"


def _request(config: Config, files: AllocationFolder, idle_s: float) -> str:
    """Submit a new job; returns its id."""
    script = render_job_script(config, files, idle_s)
    require_slurm_accepts(script)
    files.prepare()
    files.job_script.write_text(script, encoding="utf-8")
    files.shell_script.write_text(render_shell_script(config, files), encoding="utf-8")
    cost = compute_cost(config)
    print(f"{cost}; it ends after {idle_s / 60:g} min without use", file=sys.stderr, flush=True)
    return submit_job(files.job_name, ("sbatch", "--parsable", str(files.job_script)), [])


def wait_until_running(files: AllocationFolder, job: str) -> None:
    """Wait until the keeper of the job is at work. Raises an EchelonError if the job is gone.

    The keeper says so by a file, so that the controller is asked seldom. Ctrl-C leaves the job in
    the queue.
    """
    said = ""
    asked_s = time.monotonic()
    while files.read_state(job) is None:
        time.sleep(_FILE_POLL_S)
        if time.monotonic() < asked_s + _QUEUE_POLL_S:
            continue
        found = find_allocation(files.name)
        asked_s = time.monotonic()
        if found is None or found.job != job:
            if files.read_state(job) is None:
                raise make_over_error(files, job)
            continue
        reason = f" ({found.reason})" if found.reason else ""
        if (now := f"job {job}: {found.state.lower()}{reason}") != said:
            said = now
            print(now, file=sys.stderr, flush=True)


def make_over_error(files: AllocationFolder, job: str) -> EchelonError:
    """Return the error for a job that is over, with what it has said last."""
    why, hint = "it left the queue", f"its output is in {files.log_file}"
    if not files.log_file.exists():
        hint = (
            f"its nodes have to see {files.folder}; set ECHELON_CACHE to a folder that they share"
        )
    for file in (files.ended_file, files.log_file):
        with contextlib.suppress(OSError, IndexError):
            why = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            break
    return EchelonError(Fault(f"job {job} is over: {why}", hint), exit=ExitCode.NOT_FOUND)


def open_shell(files: AllocationFolder, job: str) -> int:
    """Open a shell on the first node of the job, in this terminal; returns 0 once it is left, and
    says what becomes of the job."""
    state = files.read_state(job)
    if state is None:
        raise make_over_error(files, job)
    words = [
        *("srun", f"--jobid={job}", "--overlap", "--pty", "--export=ALL"),
        *("--nodes=1", "--ntasks=1", f"--nodelist={state['node']}"),
        f"--cpus-per-task={state['cpus']}",
        *("bash", str(files.shell_script)),
    ]
    # Ctrl-C is for srun and what runs in the shell. A handler, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = subprocess.run(words).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    if files.ended_file.exists():
        why = files.ended_file.read_text(encoding="utf-8").strip()
        print(f"job {job} is over: {why}", file=sys.stderr)
        return ExitCode.OK
    if code:
        return _explain_lost_shell(files, job, code)
    limit = state["idle_limit_s"] / 60
    name = "" if files.name == "dev" else f" --name {files.name}"
    print(
        f"job {job} goes on, until it is idle for {limit:g} min\n"
        f"  hint: `echelon dev{name}` comes back, `echelon dev --end{name}` ends it",
        file=sys.stderr,
    )
    return ExitCode.OK


def _explain_lost_shell(files: AllocationFolder, job: str, code: int) -> int:
    """Say whether the job is over, or its shell alone has ended; returns the exit code."""
    found = find_allocation(files.name)
    if found is None or found.job != job:
        print(f"job {job} is over: its time was up, or somebody ended it", file=sys.stderr)
        return ExitCode.OK
    raise EchelonError(
        Fault(
            f"srun gave no shell in job {job}, or lost it: it ended with {code}",
            "type the same again: the job goes on",
        ),
        exit=ExitCode.FAILED,
    )
