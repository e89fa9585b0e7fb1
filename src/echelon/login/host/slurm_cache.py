"""What Slurm last said of this user's jobs, in a file that all sessions share.

However many laptops and pages are open, the controller is asked once per ten seconds at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.runs.slurm_queue import query_accounting, query_own_queue
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock

ASK_EVERY_S = 10.0


def read_job_states(folder: Path, jobs: Sequence[str]) -> dict[str, Any]:
    """Return `{asked, states: {job: [state, reason]}, error}` of these jobs, at most ten seconds
    old."""
    if not jobs:
        return {"asked": time.time(), "states": {}, "error": ""}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "slurm.json"
    answer = read_json_object(file) or {}
    if not _is_fresh(answer):
        with FileLock(folder / "slurm.lock"):
            answer = read_json_object(file) or {}
            if not _is_fresh(answer):
                answer = _ask_slurm(answer, jobs)
                write_json_atomically(file, answer)
    states = {**answer["ended"], **answer["states"]}
    # Of the number of an array, the states of its tasks.
    known = {job: states[job] for job in states if job in jobs or _get_array(job) in jobs}
    return {"asked": answer["asked"], "states": known, "error": answer["error"]}


def _is_fresh(answer: dict[str, Any]) -> bool:
    asked = answer.get("asked")
    return isinstance(asked, (int, float)) and 0 <= time.time() - asked < ASK_EVERY_S


def _ask_slurm(before: dict[str, Any], jobs: Sequence[str]) -> dict[str, Any]:
    """Ask for the jobs in the queue, and for those that have left it how they ended."""
    asked = time.time()
    queue = query_own_queue()
    ended: dict[str, Any] = before.get("ended") or {}
    told = {*queue.states, *ended}
    told |= {_get_array(job) for job in told}
    gone = [job for job in jobs if job not in told]
    if gone and not queue.error:
        ended |= {job: list(state) for job, state in query_accounting(gone).items()}
    # The queue tells of a job for minutes after its end; then only the accounting does, or nobody.
    over = {job: list(state) for job, state in queue.states.items() if not state.is_active}
    return {
        "asked": asked,
        "states": {job: list(state) for job, state in queue.states.items()},
        "ended": {
            job: state
            for job, state in (ended | over).items()
            if job in jobs or _get_array(job) in jobs
        },
        "error": queue.error,
    }


def _get_array(job: str) -> str:
    """Return the number of the array that a task is of; of another job, its own."""
    return job.partition("_")[0]
