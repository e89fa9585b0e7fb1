"""What of a run is news, and in which words."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from echelon.errors import ExitCode
from echelon.notify.message import Message, make_message
from echelon.notify.run_view import RunView
from echelon.runs.accounting import QUEUE, RESTARTS, classify_start, count_starts_on_request
from echelon.runs.run_folder import Run
from echelon.tracking.summary import format_run_argument, suggest_resume
from echelon.utils.text import format_count, format_elapsed

_NOT_FINITE = re.compile(r"\b(nan|inf|not finite)\b", re.IGNORECASE)
_DAY_S = 86_400
_LOST_INTERVAL_S, _BEST_INTERVAL_S = 600.0, 3600.0
"""At most one message in so long about losses, or about a best value."""


class News(NamedTuple):
    """One thing that happened."""

    key: str
    """The same whenever it is found again; see `notify.record`."""
    message: Message


class EventDetector:
    """Finds news in one reading after the other. What was told before is found again: the record
    in the folder knows it. Here is only what needs a clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress: tuple[int | None, int] = (None, 0)
        self._progressed_s = clock()
        self._told_s: dict[str, float] = {}
        self._last_loss = 0.0

    def find(self, view: RunView) -> Iterator[News]:
        """Yield the news of a run that goes on."""
        number = count_starts_on_request(view.history)
        phases = view.history.phases
        if phases and phases[-1].trained_since is not None:
            yield News(f"{number}/started", make_started_message(view))
        yield from self._find_not_finite(view, number)
        yield from self._find_standstill(view, number)
        yield from _find_requeues(view, number)
        yield from self._find_losses(view)
        yield from self._find_best(view)

    def _find_not_finite(self, view: RunView, number: int) -> Iterator[News]:
        if not view.summary.not_finite:
            return
        what = format_count(view.summary.not_finite, "value") + " in metrics.jsonl not finite"
        subject = f"{view.run.name}: a metric is not finite"
        yield News(
            f"{number}/nan",
            _make(view, "nan", subject, [what, *_describe(view), _look_at_logs(view.run)]),
        )

    def _find_standstill(self, view: RunView, number: int) -> Iterator[News]:
        now_s, progress = self._clock(), (view.step, view.beats)
        if progress != self._progress or view.facts.recorded_state != "running":
            self._progress, self._progressed_s = progress, now_s
            return
        if view.config.program and view.step is None:
            return  # a program that counts no steps says nothing of its progress
        still_s = now_s - self._progressed_s
        if still_s < view.config.notify.stalled_minutes * 60:
            return
        subject = f"{view.run.name}: no progress for {format_elapsed(still_s)}"
        where = f"where it stands: echelon stacks {format_run_argument(view.run)}"
        message = _make(view, "stalled", subject, [*_describe(view), where])
        yield News(f"{number}/stalled/{view.step}", message)

    def _find_losses(self, view: RunView) -> Iterator[News]:
        """One message for all that was lost since the last one."""
        if not self._is_due("lost", _LOST_INTERVAL_S):
            return
        found: list[tuple[float, str]] = []
        processes: int | None = None
        for phase in view.history.phases[-1:]:
            for each in phase.rounds:
                if each.lost or each.hosts:
                    found.append((each.began, each.reason or f"lost on {', '.join(each.hosts)}"))
                processes = each.processes
            found += [(m.time, f"{m.host}: {m.reason}") for m in phase.bad_machines]
        if not found:
            return
        at = max(found)[0]
        if at <= self._last_loss:
            return
        self._told_s["lost"], self._last_loss = self._clock(), at
        subject = f"{view.run.name}: {'a loss' if len(found) == 1 else f'{len(found)} losses'}"
        rest = [f"goes on with {processes} processes"] if processes else []
        reasons = [text for _, text in sorted(found)[-2:]]
        message = _make(view, "lost", f"{subject}, goes on", [*reasons, *rest, *_describe(view)])
        yield News(f"lost/{at:.3f}", message)

    def _find_best(self, view: RunView) -> Iterator[News]:
        if (best := view.find_best()) is None or not self._is_due("best", _BEST_INTERVAL_S):
            return
        name, value, step = best
        message = _make(
            view,
            "best",
            f"{view.run.name}: best {name} {value:.4g}",
            [f"at step {step:,}", *_describe(view)[:1], f"echelon show {_name(view.run)}"],
        )
        self._told_s["best"] = self._clock()
        yield News(f"best/{step}", message)

    def _is_due(self, event: str, interval_s: float) -> bool:
        return self._clock() - self._told_s.get(event, -interval_s) >= interval_s


def _find_requeues(view: RunView, number: int) -> Iterator[News]:
    """Yield that the run was queued again, or its workers restarted, too often within a day."""
    phases, limit = view.history.phases, view.config.notify.requeues
    again = [
        (before, phase)
        for before, phase in pairwise(phases)
        if classify_start(before, phase) in (QUEUE, RESTARTS) and view.now - phase.started < _DAY_S
    ]
    if len(again) < limit:
        return
    count = len(again) // limit * limit
    subject = f"{view.run.name}: started again {len(again)} times within a day"
    cause = again[-1][0].cause
    lines = [f"last because it was {cause}" if cause else "", *_describe(view)]
    message = _make(view, "requeued", subject, [*lines, _look_at_logs(view.run)])
    yield News(f"{number}/requeued/{count}", message)


# --- the beginning and the end ---


def make_started_message(view: RunView) -> Message:
    """Return that the first step is being made."""
    phase = view.history.phases[-1]
    size = format_count(phase.processes or 1, "process").replace("processs", "processes")
    where = f"{size} on {format_count(phase.nodes or 1, 'node')}, {phase.launcher}"
    job = f"job {phase.job}, " if phase.job else ""
    after = f", after step {phase.first_step:,}" if phase.first_step else ""
    lines = [where + after, f"{job}host {phase.host}"]
    follow = f"follow it: echelon logs {_name(view.run)} -f"
    return _make(view, "started", f"{view.run.name} started", [*lines, follow])


def find_end(view: RunView, has_leader_ended: bool) -> News | None:
    """Return how the run has ended, by its folder; None where it goes on elsewhere or later.

    ``has_leader_ended`` is false where the process that led the run was killed.
    """
    number, facts = count_starts_on_request(view.history), view.facts
    state = facts.recorded_state
    if state == "finished":
        return News(f"{number}/finished", _make_finished_message(view))
    if state == "failed":
        is_lost = facts.job and view.failure.get("exit") == ExitCode.NODE_LOST
        if is_lost and not facts.is_cancelled:
            return News(f"lost/job/{len(view.history.phases)}", _make_lost_job_message(view))
        return News(f"{number}/failed", make_failed_message(view))
    if facts.is_cancelled or (state == "preempted" and not facts.job):
        return News(f"{number}/stopped", _make_stopped_message(view))
    if state in ("preempted", "pruned"):
        return None  # the batch script queues it again; its sweep tells what is pruned
    if facts.job:
        return None  # Slurm ends a job that lost its agents, and the next start tells what was
    what = "ended without a word" if has_leader_ended else "was killed"
    return News(f"{number}/failed", make_failed_message(view, f"the process that led it {what}"))


def make_failed_message(view: RunView, cause: str = "") -> Message:
    """Return that the run has failed, with its one root cause."""
    failure, name = view.failure, view.run.name
    summary = cause or str(failure.get("summary") or "see its log")
    who = f"rank {failure.get('rank')} on {failure.get('host')}: " if failure and not cause else ""
    step = failure.get("step") if failure else view.step
    after = f" after step {step:,}" if isinstance(step, int) else ""
    event = "nan" if _NOT_FINITE.search(summary) else "failed"
    shown = {} if cause or not failure else _select(failure)
    lines = [f"{who}{summary}", *_describe(view), _suggest_resume(view), _look_at_logs(view.run)]
    return _make(view, event, f"{name} failed{after}", lines, {"failure": shown or None})


def _select(failure: dict[str, Any]) -> dict[str, Any]:
    return {key: failure.get(key) for key in ("rank", "host", "step", "summary", "exit")}


def _make_finished_message(view: RunView) -> Message:
    trained_s = view.history.trained_s
    took = f"trained for {format_elapsed(trained_s)}" if trained_s else ""
    look = f"echelon show {_name(view.run)}"
    return _make(view, "finished", f"{view.run.name} finished", [*_describe(view), took, look])


def _make_stopped_message(view: RunView) -> Message:
    phases = view.history.phases
    cause = "cancelled" if view.facts.is_cancelled else phases[-1].cause if phases else ""
    lines = [cause, *_describe(view), _suggest_resume(view)]
    return _make(view, "stopped", f"{view.run.name} stopped, saved", lines)


def _make_lost_job_message(view: RunView) -> Message:
    lines = [
        str(view.failure.get("summary") or ""),
        "its job is queued again, unless launch.max_requeues is reached",
        *_describe(view),
    ]
    return _make(view, "lost", f"{view.run.name} lost a machine", lines)


# --- words that several have ---


def make_queued_message(run: Run, job: str, waited_s: float, position: str) -> Message:
    """Return that a run waits long in the queue."""
    subject = f"{run.name} waits for {format_elapsed(waited_s)} in the queue"
    facts = {"folder": str(run.folder), "job": job}
    return make_message(
        "queued", run.name, subject, [f"job {job}", position, f"echelon jobs {_name(run)}"], facts
    )


def _make(
    view: RunView,
    event: str,
    subject: str,
    lines: list[str],
    facts: dict[str, Any] | None = None,
) -> Message:
    number = view.find_number()
    body = {
        "folder": str(view.run.folder),
        "launcher": view.facts.launcher,
        "job": view.facts.job,
        "step": view.step,
        "total_steps": view.facts.total_steps,
        "metric": None if number is None else {"name": number[0], "value": number[1]},
        "failure": None,
        **(facts or {}),
    }
    return make_message(event, view.run.name, subject, lines, body)


def _describe(view: RunView) -> list[str]:
    """Return a line with step and number, and one with the place."""
    total = view.facts.total_steps
    step = f"step {view.step:,}" if view.step is not None else ""
    step += f" of {total:,}" if step and total else ""
    number = view.find_number()
    value = f"{number[0]} {number[1]:.4g}" if number else ""
    job = f", job {view.facts.job}" if view.facts.job else ""
    host = view.facts.process.get("host") or socket.gethostname()
    return [" · ".join(filter(None, (step, value))), f"host {host}{job}"]


def _name(run: Run) -> str:
    return format_run_argument(run)


def _look_at_logs(run: Run) -> str:
    return f"logs: echelon logs {_name(run)}"


def _suggest_resume(view: RunView) -> str:
    return f"go on: {suggest_resume(view.run, view.config.script)}"
