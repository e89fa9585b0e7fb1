"""Giving a job to Slurm: whether it would take it, and sbatch, called once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.launch.slurm.batch_script import count_processes_per_node
from echelon.launch.slurm.version import require_known_options
from echelon.runs.create import create_run
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import run_slurm_command
from echelon.runs.writer import release_run_folder

_LOST_ANSWER_TIMEOUT_S = 120.0
"""How long a controller that went away has to come back and answer whether it took a job."""


def require_sbatch(instead: str = "type the command on a login node") -> None:
    """Refuse a machine without Slurm's commands; `instead` says what to do about it."""
    if shutil.which("sbatch") is None:
        raise EchelonError(
            Fault(
                "launch=slurm, but there is no sbatch on this machine's PATH",
                f"{instead}, or name that node: launch.login=HOST; --dry-run shows the script "
                "anywhere",
            )
        )


def queue_run(config: Config, text: str) -> tuple[str, Run]:
    """Submit one run; returns its job id and its folder."""
    run = create_run(config)
    try:
        run.script_file.write_text(text, encoding="utf-8", errors="surrogateescape")
        run.script_file.chmod(0o755)
        record_queued(run, config)
        job = submit_job(run.name, ("sbatch", "--parsable", str(run.script_file)), [run])
        run.job_id_file.write_text(f"{job}\n", encoding="utf-8")
    finally:
        # From here on the queue says that the folder is taken, then the agent of node 0.
        release_run_folder(run)
    return job, run


def record_queued(run: Run, config: Config) -> None:
    """Write `queued` into the status before the job exists. Once it does, the job writes its own
    status."""
    world = config.launch.nodes * count_processes_per_node(config)
    status = make_starting_status("slurm", config.launch.nodes, world)
    run.update_status(**status | {"state": "queued", "process": None, "starts": []})


def require_slurm_accepts(text: str) -> None:
    """Ask Slurm whether it would take this script, before anything is written: the partition may
    not exist, have too few nodes, or be of an older Slurm than an option."""
    require_known_options(text)
    done = run_slurm_command("sbatch", "--test-only", input=text)
    if done.returncode:
        raise _make_refusal(done.stderr)


def _make_refusal(words: str) -> EchelonError:
    """Return the error for a job that Slurm does not take, with its own reasons."""
    lines = [line.removeprefix("sbatch: ") for line in words.splitlines() if line.strip()]
    reasons = [line for line in lines if "error" in line or "failure" in line] or lines
    return EchelonError(
        Fault(
            f"Slurm does not take the job: {'; '.join(reasons)}",
            "compare launch.nodes, spares (nodes beside them), gpus_per_node, partition, account, "
            "time and sbatch with `sinfo -o '%P %D %c %G %l'`; --dry-run shows the script",
        )
    )


def submit_job(name: str, command: tuple[str, ...], created_runs: Sequence[Run]) -> str:
    """Call sbatch once; returns the job id.

    When the answer is lost, the queue is asked whether the job is there: submitting again could
    queue it twice.
    """
    before = time.time()
    done = run_slurm_command(*command, script=_read_script(command[-1]))
    job = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and job.isdecimal():
        return job
    if found := find_in_queue(name, before):
        return found
    for run in created_runs:
        run.update_status(state="not submitted")
    raise _make_refusal(done.stderr or done.stdout)


def _read_script(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # sbatch says so
        return ""


def find_in_queue(name: str, since: float) -> str | None:
    """Return the id of a job that the controller took before its answer was lost; a controller that
    went away is waited for."""
    deadline = time.monotonic() + _LOST_ANSWER_TIMEOUT_S
    done = run_slurm_command("squeue", "-h", "-n", name, "-o", "%F|%V", "--me")
    while done.returncode and time.monotonic() < deadline:
        time.sleep(1)
        done = run_slurm_command("squeue", "-h", "-n", name, "-o", "%F|%V", "--me")
    for line in done.stdout.splitlines():
        job, submitted = line.split("|", 1)
        if time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S")) >= since - 2:
            return job
    return None
