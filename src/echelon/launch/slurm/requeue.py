"""Whether a run that ended may start again in another job.

The batch script requeues; the agents decide, because they know why the run ended. They leave a file
in the run folder, since the exit status of `srun` may be that of a node that was killed.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from echelon.config.schema import LaunchConfig
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.failure import Failure
from echelon.runs.run_folder import Run

REQUEUE_FILE = "requeue"
_MAX_STARTS_FROM_ONE_STEP = 3
"""After so many starts in a row from one step another would be in vain."""


def record_start(run: Run, launch: LaunchConfig) -> int:
    """Record the start of a job of this run; returns how many failures are left to it.

    Raises an EchelonError that ends the run when it was preempted or has failed too often, or does
    not progress.
    """
    with contextlib.suppress(OSError):
        (run.folder / REQUEUE_FILE).unlink()
    status = run.read_status_file()
    starts: list[dict[str, Any]] = status.get("starts", [])
    now = {"after": _classify_ending(status), "step": run.find_newest_step(), "time": time.time()}
    starts = [*starts, now] if now["after"] else [now]  # a finished or new run counts anew
    run.update_status(starts=starts)
    stopped, failed = _count_endings(starts, "preempted", "lost"), _count_endings(starts, "failed")
    if stopped > launch.max_requeues:
        how = f"was preempted or lost a node {stopped} times"
        raise _make_limit_error(run, how, "launch.max_requeues", launch.max_requeues)
    if failed > launch.max_restarts:
        raise _make_limit_error(
            run, f"has failed {failed} times", "launch.max_restarts", launch.max_restarts
        )
    latest = [s["step"] for s in starts[-_MAX_STARTS_FROM_ONE_STEP:]]
    if len(latest) == _MAX_STARTS_FROM_ONE_STEP and len(set(latest)) == 1:
        raise EchelonError(
            Fault(
                f"run {run.name} was started {_MAX_STARTS_FROM_ONE_STEP} times in a row from step "
                f"{latest[0]} and got no further",
                "save more often (trainer.save.minutes=5), give it more time (launch.time), or "
                "look at the end of its log",
            ),
            exit=ExitCode.FAILED,
        )
    return launch.max_restarts - failed


def _classify_ending(status: dict[str, Any]) -> str:
    """Return how the last job of this run ended: preempted, lost, failed, or "" when all is
    well."""
    state = status.get("state")
    if state == "running":
        return "lost"  # killed with its node, before it could record an end
    if state == "failed":
        lost = (status.get("failure") or {}).get("exit") == ExitCode.NODE_LOST
        return "lost" if lost else "failed"
    return "preempted" if state == "preempted" else ""


def _count_endings(starts: list[dict[str, Any]], *endings: str) -> int:
    """Return how many starts followed one of these endings."""
    return sum(start["after"] in endings for start in starts)


def _make_limit_error(run: Run, how: str, key: str, limit: int) -> EchelonError:
    """Return the error for a run that has reached a limit."""
    return EchelonError(
        Fault(
            f"run {run.name} {how}, and {key}={limit}",
            f"raise {key}, then `echelon resume {run.name}`",
        ),
        exit=ExitCode.FAILED,
    )


def request_requeue_if_node_lost(run: Run, launch: LaunchConfig, failure: Failure) -> None:
    """Ask the batch script for another job if a node was lost, which another node may replace. A
    fault of the code would occur again."""
    if failure.exit != ExitCode.NODE_LOST:
        return
    if (
        _count_endings(run.read_status_file().get("starts", []), "preempted", "lost")
        < launch.max_requeues
    ):
        with contextlib.suppress(OSError):
            (run.folder / REQUEUE_FILE).write_text(
                failure.summary + "\n", encoding="utf-8", errors="replace"
            )
