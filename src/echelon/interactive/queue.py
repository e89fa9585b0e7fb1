"""The allocations in Slurm's queue, known by the names of their jobs."""

from __future__ import annotations

from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.interactive.allocation import parse_job_name
from echelon.runs.slurm_queue import ACTIVE_STATES, get_last_error_line, run_slurm_command

_FORMAT = "%A|%j|%T|%r|%N|%L|%D"


class QueuedAllocation(NamedTuple):
    """One allocation as the queue has it."""

    job: str
    name: str
    state: str
    """Slurm's word, such as PENDING."""
    reason: str
    """Why it is pending; empty otherwise."""
    nodes: str
    """Slurm's list of its nodes; empty while it is pending."""
    time_left: str
    node_count: int


def list_allocations() -> list[QueuedAllocation]:
    """Return this user's allocations. Raises an EchelonError if Slurm does not answer: nobody then
    knows whether there is one already."""
    done = run_slurm_command("squeue", "-h", "--me", "-o", _FORMAT)
    if done.returncode:
        raise EchelonError(
            Fault(
                "Slurm does not say which allocations there are: " + get_last_error_line(done),
                "type the same again when Slurm answers, on a login node; `squeue --me` asks too",
            ),
            exit=ExitCode.FAILED,
        )
    found = []
    for line in done.stdout.splitlines():
        parts = line.split("|")
        if len(parts) != 7 or (name := parse_job_name(parts[1])) is None:
            continue
        job, _, state, reason, nodes, left, count = parts
        if state in ACTIVE_STATES and state != "COMPLETING":
            waits = reason if state == "PENDING" and reason != "None" else ""
            found.append(
                QueuedAllocation(
                    job, name, state, waits, nodes, left, int(count) if count.isdecimal() else 1
                )
            )
    return found


def find_allocation(name: str) -> QueuedAllocation | None:
    """Return the allocation of this name, the newest one; None if there is none."""
    found = [each for each in list_allocations() if each.name == name]
    return max(found, key=lambda each: int(each.job)) if found else None
