"""Which machines Slurm means: those of my jobs, or those of a partition."""

from __future__ import annotations

import subprocess

from echelon.errors import EchelonError, Exit, Fault, nearest
from echelon.gpus.elsewhere import There, by_ssh
from echelon.utils.os_errors import describe_os_error

_COMMAND_S = 30.0


def machines(partition: str, me: str, ssh: str) -> list[There]:
    """Without a partition, those of my running jobs: through Slurm itself, as not every cluster
    lets one log in."""
    return _of_partition(partition, ssh) if partition else _of_my_jobs(me)


def _of_my_jobs(me: str) -> list[There]:
    asked = _slurm("squeue", "-h", "-u", me, "-t", "RUNNING", "-o", "%A|%N")
    jobs = [line.split("|", 1) for line in asked.splitlines() if "|" in line]
    found: dict[str, There] = {}
    for job, nodes in jobs:
        for host in _slurm("scontrol", "show", "hostnames", nodes).split():
            step = ("srun", "--overlap", "--quiet", f"--jobid={job}", f"--nodelist={host}")
            found.setdefault(host, There(host, (*step, "-N1", "-n1"), False))
    if not found:
        raise EchelonError(
            Fault(
                f"--slurm: {me} has no running job",
                "look at all nodes of a partition with --slurm PARTITION",
            ),
            exit=Exit.NOT_FOUND,
        )
    return [found[host] for host in sorted(found)]


def _of_partition(partition: str, ssh: str) -> list[There]:
    hosts = sorted(set(_slurm("sinfo", "-h", "-N", "-p", partition, "-o", "%N").split()))
    if not hosts:
        known = _slurm("sinfo", "-h", "-o", "%R").split()
        raise EchelonError(
            Fault(f"--slurm {partition}: there is no such partition", nearest(partition, known)),
            exit=Exit.NOT_FOUND,
        )
    return by_ssh(hosts, ssh)


def _slurm(*words: str) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=_COMMAND_S
        )
        said = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"it did not answer within {_COMMAND_S:g} s"
    except OSError as error:
        said = describe_os_error(error)
    if said:
        raise EchelonError(
            Fault(f"--slurm: {words[0]} fails: {said}", "is this a machine of a Slurm cluster?"),
            exit=Exit.NOT_FOUND,
        )
    return done.stdout
