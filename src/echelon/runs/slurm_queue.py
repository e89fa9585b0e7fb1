"""The state of Slurm jobs: from its queue, and from its accounting where that is kept."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from echelon.runs.slurm_environment import make_slurm_environment
from echelon.utils.os_errors import format_os_error_reason

_COMMAND_TIMEOUT_S = 120.0

ACTIVE_STATES = {
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED"),
    *("REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT", "SIGNALING", "STOPPED"),
}
WAITING_STATES = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"}


class SlurmJobState(NamedTuple):
    """The state of one job."""

    state: str
    reason: str = ""
    """Why it is pending."""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES


class SlurmQueueAnswer(NamedTuple):
    """The states of the jobs that Slurm knows."""

    states: dict[str, SlurmJobState]
    error: str = ""
    """Why there is no answer; empty if there is one."""


def run_slurm_command(
    *words: str, input: str | None = None, script: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command with a time limit. A command that is missing or too slow gives a
    non-zero exit code and a reason in its stderr, like one that failed. `script` is what sbatch
    reads, where that is not `input`."""
    try:
        return subprocess.run(
            words,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            input=input,
            env=make_slurm_environment(os.environ, input or script),
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        reason = f"{words[0]} did not answer within {_COMMAND_TIMEOUT_S:g} s"
        return subprocess.CompletedProcess(words, 1, "", reason)
    except OSError as error:
        reason = f"{words[0]} cannot be run here: {format_os_error_reason(error)}"
        return subprocess.CompletedProcess(words, 127, "", reason)


def query_jobs(jobs: Sequence[str]) -> SlurmQueueAnswer:
    """Return the states of jobs, by the queue and, of those that have left it, by the
    accounting."""
    answer = query_queue(jobs)
    gone = [] if answer.error else [job for job in jobs if job not in answer.states]
    return SlurmQueueAnswer(answer.states | query_accounting(gone), answer.error)


def query_queue(jobs: Sequence[str]) -> SlurmQueueAnswer:
    """Return the jobs in the queue, and those that ended so recently that Slurm still knows
    them."""
    return _query_queue("-j", _join_job_ids(jobs)) if jobs else SlurmQueueAnswer({})


def query_own_queue() -> SlurmQueueAnswer:
    """Return all jobs of this user in the queue, and those that ended recently."""
    return _query_queue("-u", str(os.getuid()))


def _query_queue(*selection: str) -> SlurmQueueAnswer:
    done = run_slurm_command("squeue", "-h", "-r", "-t", "all", *selection, "-o", "%i|%T|%r")
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2]
    states = {job: SlurmJobState(state, "" if why == "None" else why) for job, state, why in lines}
    # Of a single job that is long gone squeue says "invalid" and fails; of several, nothing.
    silent = done.returncode != 0 and "Invalid job id" not in done.stderr
    return SlurmQueueAnswer(states, get_last_error_line(done) if silent else "")


def query_queue_position(job: str) -> str:
    """Return where a job is in the queue of its partition, why it waits and when it may start, in
    words; what Slurm does not say is left out."""
    shown = run_slurm_command("squeue", "-h", "-j", job, "-o", "%P|%Q|%r|%S").stdout.splitlines()
    parts = shown[0].split("|") if shown else []
    if len(parts) != 4:
        return ""
    partition, priority, reason, start = parts
    words = [reason] if reason not in ("", "None") else []
    if start not in ("", "N/A"):
        words.append(f"may start {start.replace('T', ' ')}")
    pending = run_slurm_command("squeue", "-h", "-t", "PD", "-p", partition, "-o", "%Q").stdout
    others = [int(line) for line in pending.split() if line.isdecimal()]
    if priority.isdecimal() and others:
        before = sum(each > int(priority) for each in others)
        words.insert(0, f"place {before + 1} of {len(others)} in {partition}")
    return ", ".join(words)


def query_accounting(jobs: Sequence[str]) -> dict[str, SlurmJobState]:
    """Return how jobs ended; empty on a cluster without accounting."""
    if not jobs:
        return {}
    done = run_slurm_command(
        "sacct", "-n", "-X", "-P", "-j", _join_job_ids(jobs), "-o", "JobID,State"
    )
    lines = [line.split("|", 1) for line in done.stdout.splitlines() if "|" in line]
    return {
        job: SlurmJobState(state.split()[0]) for job, state in lines if state
    }  # CANCELLED by 1000


def _join_job_ids(jobs: Sequence[str]) -> str:
    """Return the ids for a command line. A job array is named once, not task by task."""
    return ",".join(sorted({job.partition("_")[0] for job in jobs}))


def list_job_nodes(job: str) -> list[str]:
    """Return the nodes that a job has now, in their order; empty if Slurm does not answer."""
    shown = run_slurm_command("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    return expand_node_list(shown) if shown else []


def expand_node_list(node_list: str) -> list[str]:
    """Return the names in a list of Slurm's, such as `n[1-3]`."""
    return run_slurm_command("scontrol", "show", "hostnames", node_list).stdout.split()


def read_current_job_id(env: Mapping[str, str]) -> str | None:
    """Return the id by which Slurm's commands know the job of this process; None outside of a
    job."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID')}"
    return env.get("SLURM_JOB_ID")


def get_last_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a failed command's output: usually the reason."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"{done.args[0]} ended with {done.returncode}"
