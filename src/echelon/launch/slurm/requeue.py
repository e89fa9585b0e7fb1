"""Whether a run that ended may start again in another job, and when it has to stop doing so.

The batch script requeues; the agents decide, because they know why the run ended. They say so with
a file in the run folder, since the exit status of `srun` may be that of a node that was killed.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from echelon.config.schema import Launch
from echelon.errors import EchelonError, Exit, Fault
from echelon.failure import Failure
from echelon.runs import Run

REQUEUE = "requeue"
_NO_PROGRESS = 3
"""So many starts in a row from one step, and it is not worth another."""


def begin(run: Run, launch: Launch) -> int:
    """Note a job's start; the failures that are left to it, or an error that ends the run."""
    with contextlib.suppress(OSError):
        (run.folder / REQUEUE).unlink()
    status = run.status()
    starts: list[dict[str, Any]] = status.get("starts", [])
    now = {"after": _ending(status), "step": run.newest_step(), "time": time.time()}
    starts = [*starts, now] if now["after"] else [now]  # a finished or new run counts anew
    run.update_status(starts=starts)
    stopped, failed = _count(starts, "preempted", "lost"), _count(starts, "failed")
    if stopped > launch.max_requeues:
        how = f"was preempted or lost a node {stopped} times"
        raise _no_more(run, how, "launch.max_requeues", launch.max_requeues)
    if failed > launch.max_restarts:
        raise _no_more(
            run, f"has failed {failed} times", "launch.max_restarts", launch.max_restarts
        )
    latest = [s["step"] for s in starts[-_NO_PROGRESS:]]
    if len(latest) == _NO_PROGRESS and len(set(latest)) == 1:
        raise EchelonError(
            Fault(
                f"run {run.name} was started {_NO_PROGRESS} times in a row from step {latest[0]} "
                "and got no further",
                "save more often (trainer.save.minutes=5), give it more time (launch.time), or "
                "look at the end of its log",
            ),
            exit=Exit.FAILED,
        )
    return launch.max_restarts - failed


def _ending(status: dict[str, Any]) -> str:
    """How the last job of this run ended: preempted, lost, failed, or "" when all is well."""
    state = status.get("state")
    if state == "running":
        return "lost"  # killed without a word, with its node
    if state == "failed":
        lost = (status.get("failure") or {}).get("exit") == Exit.NODE_LOST
        return "lost" if lost else "failed"
    return "preempted" if state == "preempted" else ""


def _count(starts: list[dict[str, Any]], *endings: str) -> int:
    return sum(start["after"] in endings for start in starts)


def _no_more(run: Run, how: str, key: str, limit: int) -> EchelonError:
    return EchelonError(
        Fault(
            f"run {run.name} {how}, and {key}={limit}",
            f"raise {key}, then `echelon resume {run.name}`",
        ),
        exit=Exit.FAILED,
    )


def after(run: Run, launch: Launch, failure: Failure) -> None:
    """A lost node may be replaced by another one; what the code did wrong, it would do again."""
    if launch.kind != "slurm" or failure.exit != Exit.NODE_LOST:
        return
    if _count(run.status().get("starts", []), "preempted", "lost") < launch.max_requeues:
        with contextlib.suppress(OSError):
            (run.folder / REQUEUE).write_text(
                failure.summary + "\n", encoding="utf-8", errors="replace"
            )
