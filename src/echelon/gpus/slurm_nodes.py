"""Which machines Slurm means: those of my jobs, or those of a partition."""

from __future__ import annotations

import subprocess

from echelon.errors import EchelonError, Exit, Fault, suggest_nearest
from echelon.gpus.remote import RemoteMachine, list_ssh_machines
from echelon.utils.os_errors import describe_os_error

_COMMAND_S = 30.0


def list_slurm_machines(partition: str, user: str, ssh: str) -> list[RemoteMachine]:
    """Without a partition, those of my running jobs: through Slurm itself, as not every cluster
    lets one log in."""
    return _list_partition_machines(partition, ssh) if partition else _list_job_machines(user)


def _list_job_machines(user: str) -> list[RemoteMachine]:
    asked = _run_slurm_command("squeue", "-h", "-u", user, "-t", "RUNNING", "-o", "%A|%N")
    jobs = [line.split("|", 1) for line in asked.splitlines() if "|" in line]
    found: dict[str, RemoteMachine] = {}
    for job, nodes in jobs:
        for host in _run_slurm_command("scontrol", "show", "hostnames", nodes).split():
            step = ("srun", "--overlap", "--quiet", f"--jobid={job}", f"--nodelist={host}")
            found.setdefault(host, RemoteMachine(host, (*step, "-N1", "-n1"), False))
    if not found:
        raise EchelonError(
            Fault(
                f"--slurm: {user} has no running job",
                "look at all nodes of a partition with --slurm PARTITION",
            ),
            exit=Exit.NOT_FOUND,
        )
    return [found[host] for host in sorted(found)]


def _list_partition_machines(partition: str, ssh: str) -> list[RemoteMachine]:
    hosts = sorted(
        set(_run_slurm_command("sinfo", "-h", "-N", "-p", partition, "-o", "%N").split())
    )
    if not hosts:
        known = _run_slurm_command("sinfo", "-h", "-o", "%R").split()
        raise EchelonError(
            Fault(
                f"--slurm {partition}: there is no such partition",
                suggest_nearest(partition, known),
            ),
            exit=Exit.NOT_FOUND,
        )
    return list_ssh_machines(hosts, ssh)


def _run_slurm_command(*words: str) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=_COMMAND_S
        )
        error_text = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error_text = f"it did not answer within {_COMMAND_S:g} s"
    except OSError as error:
        error_text = describe_os_error(error)
    if error_text:
        raise EchelonError(
            Fault(
                f"--slurm: {words[0]} fails: {error_text}", "is this a machine of a Slurm cluster?"
            ),
            exit=Exit.NOT_FOUND,
        )
    return done.stdout
